"""Threads that live and die together, after Go's errgroup and context.

A `Scope` starts named threads. The first exception in any of them cancels the scope: whatever waits in a
channel, at the gate or in the gradient exchange is woken with `Cancelled`, and the first exception is the
one reported. Later ones are kept for the log, they are mostly echoes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Cancelled(Exception):
    """The scope ended while this thread waited; an orderly way out, never a failure of its own."""


class Stalled(Exception):
    """A wait ran past its deadline; the message names what was waited for."""


class StageError(Exception):
    """The first exception of a scope, with the name of the thread that raised it."""

    def __init__(self, stage: str, cause: BaseException) -> None:
        super().__init__(f"{stage}: {type(cause).__name__}: {cause}")
        self.stage = stage
        self.cause = cause
        self.__cause__ = cause


class Scope:
    """A group of daemon threads with one fate.

    Daemon threads, because a thread stuck in a driver call cannot be ended from Python; the process must be
    able to leave without it.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._threads: dict[str, threading.Thread] = {}
        self._alive: set[str] = set()
        self._callbacks: list[Callable[[], None]] = []
        self._cancelled = False
        self._error: StageError | None = None
        self.later_errors: list[StageError] = []
        """Exceptions after the first, in the order of their arrival."""

    @property
    def error(self) -> StageError | None:
        with self._condition:
            return self._error

    @property
    def cancelled(self) -> bool:
        with self._condition:
            return self._cancelled

    def go(self, name: str, function: Callable[[], None]) -> None:
        """Run `function` in a new thread called `name`; names are unique in a scope."""
        with self._condition:
            if name in self._threads:
                raise ValueError(f"a thread named {name!r} was started before")
            thread = threading.Thread(target=self._run, args=(name, function), name=name, daemon=True)
            self._threads[name] = thread
            self._alive.add(name)
        thread.start()

    def _run(self, name: str, function: Callable[[], None]) -> None:
        try:
            function()
        except Cancelled:
            pass
        except BaseException as error:  # noqa: BLE001  # whatever ends a thread must reach the one who waits
            self.fail(name, error)
        finally:
            with self._condition:
                self._alive.discard(name)
                self._condition.notify_all()

    def fail(self, name: str, error: BaseException) -> None:
        """Record an exception; the first one wins and cancels the scope."""
        wrapped = error if isinstance(error, StageError) else StageError(name, error)
        with self._condition:
            if self._error is None:
                self._error = wrapped
            else:
                self.later_errors.append(wrapped)
        self.cancel()

    def cancel(self) -> None:
        """Wake everything that waits under this scope; may be called often and from any thread."""
        with self._condition:
            if self._cancelled:
                return
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for callback in callbacks:
            callback()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the scope is cancelled; at once if it is already."""
        with self._condition:
            if not self._cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout_s: float | None = None, *, only: Callable[[str], bool] | None = None) -> bool:
        """Wait until the threads chosen by `only` (default: all) have ended; False when time ran out."""
        chosen = only or (lambda name: True)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._condition:
            while any(chosen(name) for name in self._alive):
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return False
                self._condition.wait(remaining)
        return True

    def wait_until(
        self, done: Callable[[], bool], timeout_s: float | None = None, *, only: Callable[[str], bool]
    ) -> bool:
        """Wait until `done()`, or the scope is cancelled, or the threads chosen by `only` have ended.

        `done` is asked again whenever a thread ends and on `notify`. Returns False when time ran out first. None for
        the main thread while it trains: that takes as long as it takes, and every stage's own waits have deadlines.
        """
        with self._condition:
            return self._condition.wait_for(
                lambda: done() or self._cancelled or not any(map(only, self._alive)), timeout_s
            )

    def notify(self) -> None:
        """Make `wait_until` look again."""
        with self._condition:
            self._condition.notify_all()

    def alive(self) -> list[str]:
        """Names of the threads that have not ended, sorted."""
        with self._condition:
            return sorted(self._alive)
