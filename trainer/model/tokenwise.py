"""Functions of a packed row in which every token is by itself: compiled where the row has the length of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer.graphs import compiled


class _Here(threading.local):
    """What this thread is running."""

    inside: bool = False
    compiled: bool = False
    last: tuple[torch.Tensor, Any] | None = None


class Tokenwise:
    """Calls such functions for one target: compiled in rows of the announced length, as they are in all others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tokens: int | None = None
        """The announced length; None: nothing is compiled."""
        self._here = _Here()

    @contextmanager
    def row(self, tokens: int) -> Iterator[None]:
        """This thread runs a row, or a part of one, of so many tokens."""
        here = self._here
        before = here.inside, here.compiled, here.last
        here.inside, here.compiled, here.last = True, tokens == self.tokens, None
        try:
            yield
        finally:
            here.inside, here.compiled, here.last = before

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return compiled(function, self.device)(*args) if self._here.compiled else function(*args)

    def shared(self, function: Callable[..., Any], key: torch.Tensor, *args: Any) -> Any:
        """`function(*args)`, or what it gave a moment ago for the same tensor `key`; remembered within a row only."""
        last = self._here.last
        if last is not None and last[0] is key:
            return last[1]
        result = self(function, *args)
        if self._here.inside:
            self._here.last = key, result
        return result
