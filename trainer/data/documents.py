"""What a document is before it is tokenised, what a source of documents offers, and what can be wrong with either."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class DataError(ValueError):
    """Data that cannot be trained on; the message says what, why and what to do."""


class BadDocument(Exception):  # it says what the document is
    """One document cannot be used; counted and left out, or fatal with data.strict."""

    def __init__(self, where: str, reason: str, *, detail: str = "") -> None:
        """`reason` is what is counted; `detail` belongs to this one document."""
        super().__init__(f"{where}: {reason}: {detail}" if detail else f"{where}: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RawDocument:
    """One document before tokenisation: text, or a conversation, or tokens."""

    name: str
    """Where it came from, for messages: a file, or file:line."""
    text: str | None = None
    messages: list[dict[str, str]] | None = None
    input_ids: list[int] | None = None
    loss_mask: list[bool] | None = None


class DocumentSource(Protocol):
    """Documents by number. `name` is stable across runs: it decides who is held out."""

    def __len__(self) -> int: ...

    def name(self, number: int) -> str: ...

    def read(self, number: int) -> RawDocument:
        """The document. Raises BadDocument when it cannot be used."""
        ...

    def fingerprint(self) -> str:
        """Changes when documents come, go, move or change their length: a cursor means nothing then."""
        ...


def digest(parts: Iterable[object]) -> str:
    """A short hash of what a source consists of."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(f"{part}\n".encode())
    return found.hexdigest()
