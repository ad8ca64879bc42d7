"""The start-up gate: drafters, targets that compile, verifiers warm up one at a time; everyone else waits for the last.

Why: two threads that compile at once hang for ever (one's backward holds the device's autograd thread while
the other's trace needs it), and a thread that runs torch work while another compiles may fail or be
recompiled. docs/threads-and-compilation.md tells the whole story.

A warm-up past its deadline ends the process: a watchdog thread names the culprit, writes the Python stacks of
all threads and leaves with exit code 70. It is an ordinary Python thread because faulthandler's timer crashed
the process when it fired during a compile. Where a native call holds the interpreter lock for ever, the
watchdog cannot run either; the kernel's alarm is the second line.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from trainer.scope import Cancelled, Scope

GATE_DEADLINE_EXIT = 70
ALARM_GRACE_S = 20.0


@dataclass(frozen=True, slots=True)
class Overdue:
    """A warm-up that did not end in time."""

    culprit: str
    after_s: float
    stacks: str


class Gate:
    """An ordered turnstile followed by a door.

    `order` lists the threads that warm up; each enters `turn(name)` and is let through when it is next.
    `on_ready(name, seconds)` is called after each, `on_open` after the last and before anyone is let through,
    `on_overdue` by the watchdog; it must not return.
    """

    def __init__(
        self,
        order: Sequence[str],
        *,
        deadline_s: float,
        on_overdue: Callable[[Overdue], None],
        on_ready: Callable[[str, float], None] = lambda name, seconds: None,
        on_open: Callable[[], None] = lambda: None,
        scope: Scope | None = None,
        alarm: bool = False,
    ) -> None:
        if len(set(order)) != len(order):
            raise ValueError(f"the gate's order names a thread twice: {list(order)}")
        self._order = tuple(order)
        self._deadline_s = deadline_s
        self._on_overdue = on_overdue
        self._on_ready = on_ready
        self._on_open = on_open
        self._alarm = alarm
        self._condition = threading.Condition()
        self._next = 0
        self._turn_began = time.monotonic()
        self._cancelled = False
        if scope is not None:
            scope.on_cancel(self.cancel)
        self._arm_alarm()
        threading.Thread(target=self._watch, name="gate-watchdog", daemon=True).start()

    @property
    def is_open(self) -> bool:
        with self._condition:
            return self._next == len(self._order)

    def cancel(self) -> None:
        """Wake everyone at the gate with Cancelled and let the watchdog go."""
        with self._condition:
            self._cancelled = True
            self._condition.notify_all()
        self._disarm_alarm()

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Hold the turnstile while `name` warms up. An exception inside leaves the gate shut."""
        if name not in self._order:
            raise ValueError(f"{name} has no turn at the gate; the order is {list(self._order)}")
        with self._condition:
            self._wait(lambda: self._next < len(self._order) and self._order[self._next] == name)
            began = time.monotonic()
        yield
        self._on_ready(name, time.monotonic() - began)
        if name == self._order[-1]:
            self._on_open()
        with self._condition:
            self._next += 1
            self._turn_began = time.monotonic()
            self._condition.notify_all()
            done = self._next == len(self._order)
        self._disarm_alarm() if done else self._arm_alarm()

    def wait_open(self) -> None:
        """Wait until the last warm-up is done. Raises Cancelled; the watchdog bounds the wait."""
        with self._condition:
            self._wait(lambda: self._next == len(self._order))

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._condition.wait_for(lambda: self._cancelled or ready())
        if self._cancelled:
            raise Cancelled("the gate was cancelled")

    def _watch(self) -> None:
        with self._condition:
            while not self._cancelled and self._next < len(self._order):
                remaining = self._turn_began + self._deadline_s - time.monotonic()
                if remaining <= 0:
                    culprit = self._order[self._next]
                    break
                self._condition.wait(remaining)
            else:
                return
        # Outside the lock: the report must not depend on anything that a hung thread may hold.
        self._on_overdue(Overdue(culprit, self._deadline_s, all_stacks(first=culprit)))

    def _arm_alarm(self) -> None:
        # SIGALRM keeps its default action, so the kernel ends the process even if no Python code can run.
        if self._alarm:
            signal.setitimer(signal.ITIMER_REAL, self._deadline_s + ALARM_GRACE_S)

    def _disarm_alarm(self) -> None:
        if self._alarm:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def all_stacks(first: str | None = None) -> str:
    """The Python stacks of all threads by name, the one called `first` at the top."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: (names.get(item[0]) != first, item[0]))
    parts = []
    for ident, frame in frames:
        name = names.get(ident, f"thread {ident}")
        parts.append(f"--- thread {name} ---\n{''.join(traceback.format_stack(frame)).rstrip()}")
    return "\n".join(parts)
