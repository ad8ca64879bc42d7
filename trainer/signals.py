"""TERM, HUP and INT ask for an orderly stop; a second one of them ends the process at once.

The handler only puts the signal's number into a SimpleQueue, which is safe to do from a handler; a thread
named `signals` acts on it. So the main thread may be anywhere, and the action may take locks.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class StopSignals:
    """Installed once, in the main thread.

    `on_first(name)` runs for the first signal; for the second, `on_second(name)` and then exit code 1.
    """

    def __init__(self, on_first: Callable[[str], None], on_second: Callable[[str], None]) -> None:
        self._on_first = on_first
        self._on_second = on_second
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=self._act, name="signals", daemon=True).start()
        for number in STOP_SIGNALS:
            # A shell without job control starts background jobs with INT ignored: a Ctrl-C there is not for us.
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._queue.put(number)

    def _act(self) -> None:
        self._on_first(signal.Signals(self._queue.get()).name)
        self._on_second(signal.Signals(self._queue.get()).name)
        os._exit(1)
