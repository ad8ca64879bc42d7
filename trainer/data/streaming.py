"""data.streaming: documents read in the order of their files through Hugging Face datasets, and no index.

Rows are read in windows of data.shuffle_window documents; each window is permuted by (seed, epoch, number of the
window). A document's number is its file's number and its row in that file, so a place is found again by the
dataset's own skip within one file, and names are those of the mapped sources.

Held out are the documents of the first window whose names hash lowest, at most a quarter of it: with a corpus of one
window these are the mapped source's own, and no more than a window is read to know them.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.config import DataConfig
from trainer.data.documents import DataError, RawDocument, digest
from trainer.data.order import permutation, seed_for
from trainer.data.rows import line_document, row_document
from trainer.data.sources import find_files, heldout_of

ROW_BITS = 40
"""A document's number is file << ROW_BITS | row; rows count from 0."""

PARQUET_BATCH = 1024
"""Rows decoded at once. By itself the library decodes a row group, and fails where that is empty."""

OpenRows = Callable[[Path, str, int], Iterator[dict[str, Any]]]
"""(file, format, rows to skip) -> the file's further rows; of JSON lines each row is {"text": line}."""


def open_rows(path: Path, form: str, skip: int) -> Iterator[dict[str, Any]]:
    """Rows of one file through datasets in streaming mode. Raises DataError where it is no such file."""
    from datasets.exceptions import DatasetsError  # slow to import, and only tables and streams need it
    from datasets.packaged_modules.arrow.arrow import Arrow
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.packaged_modules.text.text import Text

    # The builders themselves: load_dataset reports each opening to its hub, which many a training machine cannot reach.
    # Lines as text: the JSON builder ends a file at its first bad line, and wants one type a column. A byte that is no
    # UTF-8 becomes \xNN, which is no JSON either, so such a line is bad here as in a mapped file.
    builders: dict[str, tuple[Any, dict[str, Any]]] = {
        "jsonl": (Text, {"encoding_errors": "backslashreplace"}),
        "arrow": (Arrow, {}),
        "parquet": (Parquet, {"batch_size": PARQUET_BATCH}),
    }
    builder, options = builders[form]
    name = glob.escape(str(path.resolve()))  # the library takes names as patterns
    try:
        rows = builder(data_files={"train": [name]}, **options).as_streaming_dataset(split="train")
        yield from rows.skip(skip)
    except (OSError, TypeError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(f"{path} cannot be read as {form}: {error.__cause__ or error}") from error


class Streamed:
    """A corpus of which never more than one window is held, beside the documents that were fetched."""

    def __init__(
        self,
        files: Sequence[Path],
        root: Path,
        form: str,
        *,
        window: int,
        seed: int,
        heldout: int,
        rows: OpenRows = open_rows,
    ) -> None:
        """Reads the first window. Raises DataError where it cannot be read."""
        self._files, self._form, self._open_rows = files, form, rows
        self._names = [path.relative_to(root).as_posix() if path != root else path.name for path in files]
        self._size, self._seed = window, seed
        self._fetched: dict[int, dict[str, Any]] = {}
        self._order: list[int] = []
        self._offset = 0
        self.heldout: frozenset[int] = frozenset()
        self.begin(0)
        self._load()
        self.empty = not self._window
        self.heldout = frozenset(heldout_of(list(self._window), self.name, heldout))
        self._order = [number for number in self._order if number not in self.heldout]

    def begin(self, epoch: int) -> None:
        self._rows = self._from(0)
        self._go(epoch, window=0, start=0)
        self.drawn = 0

    def draw(self) -> int | None:
        while self._offset == len(self._order):
            if self._loaded and not self._window:
                return None
            if self._loaded:
                self._go(self._epoch, window=self._number + 1, start=self._end)
            self._load()
        self._offset += 1
        self.drawn += 1
        return self._order[self._offset - 1]

    def place(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "window": self._number,
            "start": self._start,
            "offset": self._offset,
            "drawn": self.drawn,
        }

    def seek(self, place: dict[str, Any]) -> None:
        self._rows = self._from(place["start"])
        self._go(place["epoch"], window=place["window"], start=place["start"])
        self._load()
        if place["offset"] > len(self._order):
            raise DataError(f"{self.name(self._start)}: fewer rows follow than when the checkpoint was made")
        self._offset, self.drawn = place["offset"], place["drawn"]

    def fetch(self, numbers: Iterable[int]) -> None:
        """One pass over each file that holds some of them, from the first of them to the last."""
        wanted = set(numbers)
        self._fetched = {number: row for number, row in self._window.items() if number in wanted}
        missing: dict[int, list[int]] = {}
        for number in sorted(wanted - self._fetched.keys()):
            missing.setdefault(number >> ROW_BITS, []).append(number)
        for found in missing.values():
            for number, row in self._from(found[0]):
                if number in wanted:
                    self._fetched[number] = row
                if number >= found[-1]:
                    break

    def name(self, number: int) -> str:
        row = number & ((1 << ROW_BITS) - 1)
        return f"{self._names[number >> ROW_BITS]}:{row + 1 if self._form == 'jsonl' else row}"

    def read(self, number: int) -> RawDocument:
        if number not in self._window and number not in self._fetched:
            self.fetch([number])
        row = self._window.get(number, self._fetched.get(number))
        if row is None:
            raise DataError(f"{self.name(number)} is gone: the files changed while the run read them")
        if self._form == "jsonl":
            return line_document(self.name(number), row["text"])
        return row_document(self.name(number), {key: value for key, value in row.items() if value is not None})

    def fingerprint(self) -> str:
        """By names and sizes: what lies between them is not read for it."""
        return digest([self._form, self._size, *zip(self._names, (p.stat().st_size for p in self._files), strict=True)])

    def _go(self, epoch: int, *, window: int, start: int) -> None:
        """To the beginning of a window whose rows come next, from `start` on; they are read when they are needed."""
        self._epoch, self._number, self._start, self._end = epoch, window, start, start
        self._window: dict[int, dict[str, Any]] = {}
        self._order = []
        self._loaded, self._offset = False, 0

    def _load(self) -> None:
        for number, row in islice(self._rows, self._size):
            self._window[number] = row
            self._end = number + 1
        numbers = list(self._window)
        order = permutation(len(numbers), seed_for("window", self._seed, self._epoch, self._number))
        self._order = [numbers[n] for n in order if numbers[n] not in self.heldout]
        self._loaded = True

    def _from(self, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Rows from a number on to the end of the last file, with their numbers; blank lines are none."""
        first, skip = start >> ROW_BITS, start & ((1 << ROW_BITS) - 1)
        for file in range(first, len(self._files)):
            begin = skip if file == first else 0
            for at, row in enumerate(self._open_rows(self._files[file], self._form, begin), start=begin):
                if self._form != "jsonl" or row["text"].strip():
                    yield file << ROW_BITS | at, row


def open_streamed(config: DataConfig) -> Streamed:
    """The corpus of `data.source`, streamed. Raises DataError when there is none or it cannot be streamed."""
    form, files, root = find_files(config.source, config.format)
    if form == "text":
        raise DataError(
            f"data.source {config.source!r} holds text files, which data.streaming does not read: they need no index "
            "to speak of. Leave data.streaming off, or give jsonl, arrow or parquet files"
        )
    corpus = Streamed(
        files, root, form, window=config.shuffle_window, seed=config.seed, heldout=config.heldout_documents
    )
    if corpus.empty:
        raise DataError(f"data.source {config.source!r} holds no documents: {len(files)} {form} files, all empty")
    return corpus
