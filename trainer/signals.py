"""TERM, HUP and INT ask for an orderly stop; asked again after a while, the process ends at once.

One stop often arrives as several signals: a container's shutdown sends HUP and TERM within a third of a second, and the
supervisor passes on what the kernel delivers as well. So only a signal at least `ASK_AGAIN_S` after the first counts as
a second request.

The interpreter's own C handler writes the signal's number into a pipe, and a thread named `signals` reads it there and
acts. Nothing depends on the main thread running Python code: a signal may be delivered to any thread, and a main thread
that sleeps in a lock then never runs a Python handler (seen on a GPU machine, with the drafters training happily on).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
ASK_AGAIN_S = 2.0


def leave_when_asked() -> None:
    """Until `StopSignals` takes over, a request to stop ends the process with 0: there is nothing to save yet.

    For the seconds in which torch is imported; call it in the main thread before that.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(1, f"{signal.Signals(number).name} during start-up: nothing was trained, nothing to save\n".encode())
        os._exit(0)

    _hear(leave)


def _hear(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in STOP_SIGNALS:
        # A shell without job control starts background jobs with INT ignored: a Ctrl-C there is not for us.
        if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


class StopSignals:
    """Installed once, in the main thread.

    `on_first(name)` runs for the first signal; for the second request, `on_second(name)` and then exit code 1.
    """

    def __init__(self, on_first: Callable[[str], None], on_second: Callable[[str], None]) -> None:
        self._on_first = on_first
        self._on_second = on_second
        self._read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._act, name="signals", daemon=True).start()
        _hear(self._ignore)

    def _ignore(self, number: int, frame: FrameType | None) -> None:
        """Takes the place of the default action; the pipe has the number already."""

    def _next(self) -> str:
        while True:
            number = os.read(self._read_end, 1)[0]
            if number in STOP_SIGNALS:  # the pipe gets every signal that has a Python handler
                return signal.Signals(number).name

    def _act(self) -> None:
        name = self._next()
        asked = time.monotonic()
        self._on_first(name)
        while True:
            name = self._next()
            if time.monotonic() - asked >= ASK_AGAIN_S:
                self._on_second(name)
                os._exit(1)
