"""Bounded channels between threads, with Go's semantics.

- `put` blocks while the channel is full, `get` while it is empty; both take a deadline.
- `close` says that nothing more will come: items already inside are still delivered, then `get` raises
  `Closed` and iteration ends. `put` after `close` raises `Closed`.
- `cancel` says that nobody needs the rest: what is inside is dropped and every waiter gets `Cancelled`.

Every item goes to exactly one receiver. Waiting is on a condition variable; nothing polls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from trainer.scope import Cancelled, Scope, Stalled

ItemT = TypeVar("ItemT")


class Closed(Exception):
    """The channel is closed: for `get` also drained, for `put` no longer accepting."""


class Channel(Generic[ItemT]):
    """A bounded first-in first-out queue for any number of senders and receivers.

    `deadline_s` bounds every wait that names no timeout of its own; None waits as long as the scope lives.
    """

    def __init__(
        self, capacity: int, *, name: str = "channel", scope: Scope | None = None, deadline_s: float | None = None
    ) -> None:
        if capacity < 1:
            raise ValueError(f"{name}: a channel needs a capacity of at least 1, got {capacity}")
        self.name = name
        self.capacity = capacity
        self._deadline_s = deadline_s
        self._items: deque[ItemT] = deque()
        lock = threading.Lock()
        self._not_empty = threading.Condition(lock)
        self._not_full = threading.Condition(lock)
        self._closed = False
        self._cancelled = False
        if scope is not None:
            scope.on_cancel(self.cancel)

    def __len__(self) -> int:
        with self._not_empty:
            return len(self._items)

    def put(self, item: ItemT, timeout_s: float | None = None) -> None:
        """Append `item`, waiting for room.

        Raises Closed after `close`, Cancelled after `cancel`, Stalled when the wait runs past its deadline;
        in all three cases the item was not taken.
        """
        deadline = self._deadline(timeout_s)
        with self._not_full:
            while True:
                self._refuse_cancelled()
                if self._closed:
                    raise Closed(f"{self.name} is closed")
                if len(self._items) < self.capacity:
                    break
                self._wait(self._not_full, deadline, "full: its receiver takes nothing")
            self._items.append(item)
            self._not_empty.notify()

    def get(self, timeout_s: float | None = None) -> ItemT:
        """Take the oldest item, waiting for one.

        Raises Closed when closed and drained, Cancelled after `cancel`, Stalled past the deadline.
        """
        deadline = self._deadline(timeout_s)
        with self._not_empty:
            while True:
                self._refuse_cancelled()
                if self._items:
                    break
                if self._closed:
                    raise Closed(f"{self.name} is closed and drained")
                self._wait(self._not_empty, deadline, "empty: its sender sends nothing")
            item = self._items.popleft()
            self._not_full.notify()
            return item

    def close(self) -> None:
        """No more items will come. Closing twice is allowed: several senders may each close at their end."""
        with self._not_empty:
            self._closed = True
            self._not_empty.notify_all()
            self._not_full.notify_all()

    def cancel(self) -> None:
        """Drop what is inside and wake everyone with Cancelled."""
        with self._not_empty:
            self._cancelled = True
            self._items.clear()
            self._not_empty.notify_all()
            self._not_full.notify_all()

    def __iter__(self) -> Iterator[ItemT]:
        """Items until the channel is closed and drained."""
        while True:
            try:
                item = self.get()
            except Closed:
                return
            yield item

    def _deadline(self, timeout_s: float | None) -> float | None:
        chosen = self._deadline_s if timeout_s is None else timeout_s
        return None if chosen is None else time.monotonic() + chosen

    def _refuse_cancelled(self) -> None:
        if self._cancelled:
            raise Cancelled(f"{self.name} was cancelled")

    def _wait(self, condition: threading.Condition, deadline: float | None, state: str) -> None:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            # A wake-up meant for us may have been lost to this timeout; hand it on.
            condition.notify()
            raise Stalled(f"{self.name} stayed {state} in time")
        condition.wait(remaining)
