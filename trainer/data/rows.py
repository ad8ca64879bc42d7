"""Rows of conversation and table files: JSON lines, Arrow and Parquet.

A row is one of
    {"messages": [{"role": ..., "content": ...}, ...]}     also as "conversations" with "from" and "value"
    {"text": ...}
    {"input_ids": [...], "loss_mask": [...]}               already tokenised; without a mask all is supervised
"""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.data.documents import BadDocument, DataError, RawDocument, digest

TOKENS = 2**31
"""No vocabulary has as many rows."""
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


class JsonLines:
    """One JSON object a line; lines are found once and read when they are needed."""

    def __init__(self, files: Sequence[Path], root: Path) -> None:
        """Raises DataError where a file cannot be read."""
        self._root = root
        self._lines: list[tuple[Path, int, int]] = []  # file, line number from 1, first byte
        self._ends: list[int] = []
        for path in files:
            start = 0
            try:
                with path.open("rb") as file:
                    for number, line in enumerate(file, start=1):
                        if line.strip():
                            self._lines.append((path, number, start))
                        start += len(line)
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}") from error
            self._ends.append(start)

    def __len__(self) -> int:
        return len(self._lines)

    def name(self, number: int) -> str:
        path, line, _ = self._lines[number]
        return f"{path.relative_to(self._root).as_posix() if path != self._root else path.name}:{line}"

    def fingerprint(self) -> str:
        starts = ((self.name(n), start) for n, (_, _, start) in enumerate(self._lines))
        return digest([*starts, *self._ends])

    def read(self, number: int) -> RawDocument:
        path, _, start = self._lines[number]
        where = self.name(number)
        try:
            with path.open("rb") as file:
                file.seek(start)
                line = file.readline()
        except OSError as error:
            raise BadDocument(where, "unreadable", detail=str(error.strerror)) from error
        return line_document(where, line)


class Table:
    """Rows of Arrow or Parquet files through Hugging Face datasets, mapped into memory, never loaded whole."""

    def __init__(self, files: Sequence[Path], root: Path, form: str) -> None:
        """Raises DataError where a file is no table of that kind."""
        import datasets  # slow to import, and only tables need it
        from datasets.exceptions import DatasetsError

        self._names = [path.relative_to(root).as_posix() if path != root else path.name for path in files]
        self._tables: list[Any] = []
        for path in files:
            try:
                table = datasets.Dataset.from_file(str(path)) if form == "arrow" else _parquet(path)
            except (OSError, ValueError, RuntimeError, DatasetsError) as error:
                # The library's own error says no more than that there was one; its cause says which.
                raise DataError(f"{path} cannot be read as {form}: {error.__cause__ or error}") from error
            self._tables.append(table)
        self._starts = [0]
        for table in self._tables:
            self._starts.append(self._starts[-1] + len(table))

    def __len__(self) -> int:
        return self._starts[-1]

    def _at(self, number: int) -> tuple[int, int]:
        which = max(n for n, start in enumerate(self._starts[:-1]) if start <= number)
        return which, number - self._starts[which]

    def name(self, number: int) -> str:
        which, row = self._at(number)
        return f"{self._names[which]}:{row}"

    def fingerprint(self) -> str:
        return digest(zip(self._names, self._starts, strict=False))

    def read(self, number: int) -> RawDocument:
        which, row = self._at(number)
        values = {key: value for key, value in self._tables[which][row].items() if value is not None}
        return row_document(self.name(number), values)


def _parquet(path: Path) -> Any:
    import datasets

    return datasets.Dataset.from_parquet(glob.escape(str(path)))  # the library takes names as patterns


def line_document(where: str, line: str | bytes) -> RawDocument:
    """One line of JSON as a document. Raises BadDocument."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or brackets without end
        raise BadDocument(where, "no JSON object") from error
    return row_document(where, row)


def row_document(where: str, row: Any) -> RawDocument:
    """One row as a document. Raises BadDocument saying what the row lacks."""
    if not isinstance(row, dict):
        raise BadDocument(where, "no JSON object")
    if "messages" in row or "conversations" in row:
        return RawDocument(where, messages=_messages(where, row.get("messages", row.get("conversations"))))
    if "input_ids" in row:
        ids, mask = row["input_ids"], row.get("loss_mask")
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < TOKENS for i in ids):
            raise BadDocument(where, "input_ids is no list of token numbers")
        if mask is not None and (not isinstance(mask, list) or len(mask) != len(ids)):
            raise BadDocument(where, "loss_mask is not as long as input_ids")
        if mask is not None and not all(m in (0, 1) for m in mask):
            raise BadDocument(where, "loss_mask holds something else than 0 and 1, true and false")
        return RawDocument(where, input_ids=ids, loss_mask=None if mask is None else [bool(m) for m in mask])
    if isinstance(row.get("text"), str):
        return RawDocument(where, text=row["text"])
    raise BadDocument(where, "neither messages nor text nor input_ids")


def _messages(where: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise BadDocument(where, "messages is no list of turns")
    turns = []
    for turn in value:
        if not isinstance(turn, dict):
            raise BadDocument(where, "a turn is no object")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise BadDocument(where, "a turn has no role or no text")
        turns.append({"role": ROLES.get(role, role), "content": content})
    return turns
