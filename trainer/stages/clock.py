"""How busy a stage is: the share of time in which it did not wait for another stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Counts the seconds its stage spends waiting. One thread waits, another reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waited_s = 0.0
        self._waiting_since: float | None = None
        self._window_began = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Everything inside counts as waiting."""
        with self._lock:
            self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                assert self._waiting_since is not None
                self._waited_s += time.monotonic() - max(self._waiting_since, self._window_began)
                self._waiting_since = None

    def utilization(self) -> float:
        """Busy share since the last call, in [0, 1]; starts a new window."""
        with self._lock:
            now = time.monotonic()
            waited = self._waited_s
            if self._waiting_since is not None:
                waited += now - max(self._waiting_since, self._window_began)
            elapsed = now - self._window_began
            self._window_began, self._waited_s = now, 0.0
        return min(1.0, max(0.0, 1.0 - waited / elapsed)) if elapsed > 0 else 0.0
