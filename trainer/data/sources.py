"""Where documents come from: the standard library's source, text files, and later conversation files.

A source is a list of documents that can be read by number, so that an epoch's order is a permutation
and a position in it is one integer. Text is read when it is needed; nothing is held for the whole run.
"""

from __future__ import annotations

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
