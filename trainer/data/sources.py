"""Where documents come from: the standard library's source, text files, or the rows of `trainer.data.rows`.

A source is a list of documents that can be read by number, so that an epoch's order is a permutation
and a position in it is one integer. Text is read when it is needed; nothing is held for the whole run.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.config import HUB_NAME, ConfigError
from trainer.data.documents import BadDocument, DataError, DocumentSource, RawDocument, digest
from trainer.data.rows import JsonLines, Table

SUFFIXES = {
    "text": (".txt", ".md", ".rst", ".py", ".text"),
    "jsonl": (".jsonl", ".ndjson"),
    "arrow": (".arrow",),
    "parquet": (".parquet",),
}
"""File suffixes by data.format."""


def stdlib_files(*, include_tests: bool = False) -> list[Path]:
    """The Python standard library's source files on this machine, sorted; site-packages never."""
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "__pycache__"}
    if not include_tests:
        excluded |= {"test", "tests", "idle_test"}
    return [p for p in sorted(root.rglob("*.py")) if not excluded.intersection(p.relative_to(root).parts)]


class TextFiles:
    """Plain text files. Long ones are cut at line ends into parts, so that one big file is many documents."""

    PART_BYTES = 65536

    def __init__(self, files: list[Path], root: Path) -> None:
        self._parts: list[tuple[Path, int, int]] = []  # file, first byte, last byte
        self._root = root
        for path in files:
            size = path.stat().st_size
            self._parts += [
                (path, start, min(size, start + self.PART_BYTES)) for start in range(0, size, self.PART_BYTES)
            ]

    def __len__(self) -> int:
        return len(self._parts)

    def name(self, number: int) -> str:
        path, start, _ = self._parts[number]
        relative = path.relative_to(self._root).as_posix() if path != self._root else path.name
        return f"{relative}#{start // self.PART_BYTES}"

    def fingerprint(self) -> str:
        return digest((self.name(n), end) for n, (_, _, end) in enumerate(self._parts))

    def read(self, number: int) -> RawDocument:
        path, start, end = self._parts[number]
        try:
            with path.open("rb") as file:
                # A part owns the lines that begin inside it; its last line may run past its end.
                file.seek(max(0, start - 1))
                if start > 0:
                    file.readline()
                data = file.read(max(0, end - file.tell()))
                if data and not data.endswith(b"\n"):
                    data += file.readline()
        except OSError as error:
            raise BadDocument(str(path), "unreadable", detail=str(error.strerror)) from error
        if b"\0" in data:
            raise BadDocument(
                self.name(number), "no text", detail="it holds NUL bytes; text in UTF-16 has to become UTF-8"
            )
        return RawDocument(self.name(number), text=data.decode("utf-8", errors="replace"))


def open_source(source: str, format: str) -> DocumentSource:
    """The documents of `data.source`. Raises DataError when there are none."""
    if source == "stdlib":
        return TextFiles(stdlib_files(), Path(sysconfig.get_path("stdlib")))
    form, files, root = find_files(source, format)
    documents: DocumentSource
    if form == "text":
        documents = TextFiles(files, root)
    else:
        documents = JsonLines(files, root) if form == "jsonl" else Table(files, root, form)
    if len(documents) == 0:
        raise DataError(f"data.source {source!r} holds no documents: {len(files)} {form} files, all empty")
    return documents


def find_files(source: str, format: str) -> tuple[str, list[Path], Path]:
    """Format, files and root of `data.source`.

    Raises DataError where there are none or their kind is not clear, ConfigError for a name that only a hub knows.
    """
    path = Path(source).expanduser()
    if not path.exists():
        if HUB_NAME.fullmatch(source):
            raise ConfigError(
                f"data.source {source!r} is no file or directory here. It looks like a data set on the Hugging Face "
                "hub, and a run reads local files only, so that it never waits for a network; download it first: "
                f"`hf download {source} --repo-type dataset --local-dir DIR`, then set data.source=DIR"
            )
        looked = "" if path.is_absolute() else f" (looked for at {path.absolute()})"
        raise DataError(
            f"data.source {source!r} does not exist on this machine{looked}; "
            "give `stdlib`, or the absolute path of a file or a directory"
        )
    form, files = _files(path, format)
    return form, files, path if path.is_dir() else path.parent


def _files(path: Path, format: str) -> tuple[str, list[Path]]:
    """The format of a source and its files. Raises DataError when it cannot tell."""
    every = [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()]
    by_form = {form: [p for p in every if p.suffix in suffixes] for form, suffixes in SUFFIXES.items()}
    if format != "auto":
        files = every if path.is_file() else by_form[format]
        if not files:
            raise DataError(f"data.source {str(path)!r} holds no {format} files ({' '.join(SUFFIXES[format])})")
        return format, files
    found = {form: files for form, files in by_form.items() if files}
    if not found and path.is_file():
        return "text", every
    if len(found) != 1:
        what = " and ".join(found) if found else "no file of a known kind"
        raise DataError(f"data.source {str(path)!r} holds {what}; set data.format to one of {', '.join(SUFFIXES)}")
    return next(iter(found.items()))


def heldout_numbers(source: DocumentSource, count: int) -> set[int]:
    """Documents kept for evaluation: by a stable hash of their names, at most a quarter of all."""
    return heldout_of(range(len(source)), source.name, count)


def heldout_of(numbers: Sequence[int], name: Callable[[int], str], count: int) -> set[int]:
    """The rule of `heldout_numbers` among some documents."""

    def key(number: int) -> bytes:
        return hashlib.blake2b(name(number).encode(), digest_size=16).digest()

    return set(sorted(numbers, key=key)[: min(count, len(numbers) // 4)])
