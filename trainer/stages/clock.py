"""Where a stage's time goes: working, or waiting for input, for room behind it, or for the gradient exchange.

A stage is in one state at a time, and each change of state is a mark on its timeline. On a CPU a mark is the clock. On
a GPU it is an event on the stage's own stream, because the host says little there: it queues the work and goes on, so a
target's thread may wait for room nearly all the time while its device never rests. Between two events the device either
worked or stood still, and what it stood still for is what the host waited for, or what the stream was told to wait for,
between the same two marks. Nobody waits for an event here: what is not reached yet counts at a later reading.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

State = Literal["busy", "input", "output", "exchange", "other"]
"""`other`: neither at work nor waiting for a stage: logging, copies for a checkpoint, launches that come too late."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds in each state, and what was done meanwhile."""

    busy: float = 0.0
    input: float = 0.0
    output: float = 0.0
    exchange: float = 0.0
    other: float = 0.0
    batches: int = 0
    exchanges: tuple[tuple[int, float], ...] = ()
    """(number since the stage began, seconds) of each gradient exchange that ended."""

    @property
    def elapsed(self) -> float:
        return self.busy + self.input + self.output + self.exchange + self.other

    @property
    def occupied(self) -> float:
        """Seconds in which nobody else held this stage up."""
        return self.busy + self.other

    def share(self, seconds: float) -> float:
        """A part of the elapsed time, in [0, 1]; 0 where nothing is known yet."""
        return min(1.0, max(0.0, seconds / self.elapsed)) if self.elapsed > 0 else 0.0

    def __add__(self, later: StageTimes) -> StageTimes:
        return StageTimes(
            self.busy + later.busy,
            self.input + later.input,
            self.output + later.output,
            self.exchange + later.exchange,
            self.other + later.other,
            self.batches + later.batches,
            self.exchanges + later.exchanges,
        )


class Timeline(Protocol):
    """Marks in the order in which they are made."""

    def mark(self) -> Any:
        """Now: behind everything that the stage has done or queued so far."""
        ...

    def reached(self, mark: Any) -> bool:
        """Whether everything before the mark has happened. Never waits."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks that were reached."""
        ...

    def wait_event(self, event: Any) -> None:
        """What is queued from now on comes after the event. Nothing on a CPU."""
        ...


class HostTimeline:
    """The clock; a mark is reached as it is made."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now

    def mark(self) -> float:
        return self._now()

    def reached(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait_event(self, event: Any) -> None:
        """A tensor of another device is waited for where it is copied."""


class DeviceTimeline:
    """Events on one CUDA stream. Marks may be made by any thread; the stream's order is what counts."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(self._stream)
        return event

    def reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def wait_event(self, event: Any) -> None:
        if event is not None:
            self._stream.wait_event(event)


@dataclass(frozen=True, slots=True)
class _Change:
    """From this mark on the stage is in `state`; `batch`: a batch was finished here."""

    mark: Any
    state: State
    batch: bool


class StageClock:
    """The timeline of one stage. Its thread changes the state, another thread reads."""

    def __init__(self, device: str = "cpu", *, timeline: Timeline | None = None) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._timeline: Timeline = timeline or HostTimeline()
        self._begin("other")

    def _begin(self, state: State) -> None:
        self._state: State = state
        self._pending = deque([_Change(self._timeline.mark(), state, False)])
        self._seconds: dict[State, float] = {"busy": 0.0, "input": 0.0, "output": 0.0, "exchange": 0.0, "other": 0.0}
        self._batches = 0
        self._exchange = 0.0  # seconds so far of the exchange under way
        self._exchange_number = 0
        self._exchanges: list[tuple[int, float]] = []

    def follow_device(self) -> None:
        """Call it on the stage's own thread once its stream is current: on a GPU marks are events from here on."""
        if not self.device.startswith("cuda"):
            return
        import torch

        with self._lock:
            self._timeline = DeviceTimeline(torch.cuda.current_stream(torch.device(self.device)))
            self._begin(self._state)

    @contextmanager
    def state(self, state: State, *, batch: bool = False) -> Iterator[None]:
        """Everything inside is this state, what follows is `other`. `batch`: it finishes one, unless it fails."""
        self._change(state)
        try:
            yield
        except BaseException:
            self._change("other")
            raise
        self._change("other", batch=batch)

    def rest(self) -> None:
        """The stage has done all that there is: from now on it waits for input that never comes."""
        self._change("input")

    def wait_event(self, event: Any) -> None:
        """On a GPU: the stage's further work comes after the event, and until then the device is in this state."""
        self._timeline.wait_event(event)

    def read(self) -> StageTimes:
        """What has been reached since the last reading."""
        with self._lock:
            self._record(self._state, batch=False)
            seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
            times = StageTimes(**seconds, batches=self._batches, exchanges=tuple(self._exchanges))
            self._batches, self._exchanges = 0, []
        return times

    def _change(self, state: State, *, batch: bool = False) -> None:
        with self._lock:
            self._state = state
            self._record(state, batch=batch)

    def _record(self, state: State, *, batch: bool) -> None:
        pending = self._pending
        pending.append(_Change(self._timeline.mark(), state, batch))
        while len(pending) > 1 and self._timeline.reached(pending[1].mark):
            begin, end = pending.popleft(), pending[0]
            seconds = self._timeline.seconds(begin.mark, end.mark)
            self._seconds[begin.state] += seconds
            self._batches += end.batch
            if begin.state == "exchange":
                self._exchange += seconds
                if end.state != "exchange":
                    self._exchanges.append((self._exchange_number, self._exchange))
                    self._exchange, self._exchange_number = 0.0, self._exchange_number + 1
