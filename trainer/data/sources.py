"""Where documents come from: the standard library's source, text files, and later conversation files.

A source is a list of documents that can be read by number, so that an epoch's order is a permutation
and a position in it is one integer. Text is read when it is needed; nothing is held for the whole run.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".text")


class DataError(ValueError):
    """Data that cannot be trained on; the message says what, why and what to do."""


@dataclass(frozen=True, slots=True)
class RawDocument:
    """One document before tokenisation."""

    name: str
    """Where it came from, for messages: a file, or file:line."""
    text: str


class DocumentSource(Protocol):
    """Documents by number. `name` is stable across runs: it decides who is held out."""

    def __len__(self) -> int: ...

    def name(self, number: int) -> str: ...

    def read(self, number: int) -> RawDocument | None:
        """The document, or None when it cannot be used (it was counted as skipped)."""
        ...


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
        self.unreadable: list[str] = []

    def __len__(self) -> int:
        return len(self._parts)

    def name(self, number: int) -> str:
        path, start, _ = self._parts[number]
        relative = path.relative_to(self._root).as_posix() if path != self._root else path.name
        return f"{relative}#{start // self.PART_BYTES}"

    def read(self, number: int) -> RawDocument | None:
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
            self.unreadable.append(f"{path}: {error.strerror}")
            return None
        return RawDocument(self.name(number), data.decode("utf-8", errors="replace"))


def open_source(source: str, format: str) -> DocumentSource:
    """The documents of `data.source`. Raises DataError when there are none."""
    if source == "stdlib":
        return TextFiles(stdlib_files(), Path(sysconfig.get_path("stdlib")))
    path = Path(source).expanduser()
    if not path.exists():
        raise DataError(f"data.source {source!r} does not exist; give `stdlib`, a file or a directory")
    if format not in ("auto", "text"):
        raise DataError(f"data.format {format!r} is not supported yet; give text files")
    files = [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.suffix in TEXT_SUFFIXES]
    documents = TextFiles(files, path)
    if len(documents) == 0:
        raise DataError(
            f"data.source {source!r} holds no text: {len(files)} files with a suffix in "
            f"{' '.join(TEXT_SUFFIXES)}, all empty"
        )
    return documents


def heldout_numbers(source: DocumentSource, count: int) -> set[int]:
    """Documents kept for evaluation: by a stable hash of their names, at most a quarter of all."""

    def key(number: int) -> bytes:
        return hashlib.blake2b(source.name(number).encode(), digest_size=16).digest()

    return set(sorted(range(len(source)), key=key)[: min(count, len(source) // 4)])
