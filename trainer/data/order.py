"""In which order documents train: a corpus gives one after another, epoch after epoch, and knows its place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from trainer.data.documents import DocumentSource, RawDocument
from trainer.data.sources import heldout_numbers


class Corpus(Protocol):
    """Documents in the order in which they train. A document's number stands for it in cursors."""

    heldout: frozenset[int]
    """Never drawn."""
    drawn: int
    """Documents drawn in this epoch."""

    def begin(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        ...

    def draw(self) -> int | None:
        """The next document of the epoch; None at its end. Raises DataError where the data cannot be read."""
        ...

    def place(self) -> dict[str, Any]:
        """Where it stands, in plain JSON types."""
        ...

    def seek(self, place: dict[str, Any]) -> None:
        """Go to where `place` was taken; other keys in it do not matter."""
        ...

    def fetch(self, numbers: Iterable[int]) -> None:
        """These are about to be read, out of order; what was fetched before is let go."""
        ...

    def name(self, number: int) -> str: ...

    def read(self, number: int) -> RawDocument: ...

    def fingerprint(self) -> str: ...


class Permuted:
    """An epoch is one permutation of all documents of a source that can be read by number."""

    def __init__(self, source: DocumentSource, *, seed: int, heldout: int) -> None:
        self.heldout = frozenset(heldout_numbers(source, heldout))
        self._train = [n for n in range(len(source)) if n not in self.heldout]
        self._seed = seed
        self.name = source.name
        self.read = source.read
        self.fingerprint = source.fingerprint
        self.begin(0)

    def begin(self, epoch: int) -> None:
        self._epoch, self.drawn = epoch, 0
        self._order = permutation(len(self._train), seed_for("epoch", self._seed, epoch))

    def draw(self) -> int | None:
        if self.drawn == len(self._order):
            return None
        self.drawn += 1
        return self._train[self._order[self.drawn - 1]]

    def place(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "next": self.drawn}

    def seek(self, place: dict[str, Any]) -> None:
        self.begin(place["epoch"])
        self.drawn = place["next"]

    def fetch(self, numbers: Iterable[int]) -> None:
        """Nothing to prepare: every document is at hand."""


def permutation(count: int, seed: int) -> list[int]:
    """0 .. count - 1 in an order fixed by the seed."""
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def seed_for(purpose: str, *numbers: int) -> int:
    """A generator's seed, 63 bits, from what it is for."""
    text = " ".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
