"""Gradient exchange between the drafter replicas of one process.

Every replica brings one flat gradient tensor and one small vector of sums (loss numerator, denominator,
counts). After the exchange all of them hold the same totals, bit for bit: each element is added in the order
of the ranks, by one thread, and the result is copied to every replica. Replicas that start equal and apply
equal steps therefore stay equal.

The work is split as in a reduce-scatter: rank r sums slice r of all replicas and writes it back to all, so
the threads work side by side and no slice is touched by two of them.

A replica without a single valid anchor joins with zeros. A replica that died cancels the scope, which wakes
the others; one that is merely late runs into the deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer.scope import Cancelled, Scope, Stalled


@dataclass(frozen=True, slots=True)
class Round:
    """What one exchange decided for all replicas alike."""

    number: int
    stop: bool
    """Finish after this step; read once per round, so that all replicas agree."""
    notes: tuple[Any, ...]
    """What each rank passed as `note`, in rank order."""


class GradientExchange(Protocol):
    """Sum gradients over replicas; called once a step by each of them."""

    def reduce(self, rank: int, grads: torch.Tensor, stats: torch.Tensor, note: Any = None) -> Round:
        """Replace `grads` and `stats` by their sums over all ranks.

        Raises Cancelled when the scope ended, Stalled when a replica did not come in time.
        """
        ...


@dataclass(slots=True)
class _Seat:
    """What one rank brings to the current round."""

    tensors: tuple[torch.Tensor, ...]
    note: Any
    ready: torch.cuda.Event | None


class InProcessExchange:
    """The exchange between threads, on CPU and by peer copies between GPUs.

    On GPUs nothing waits for the host: each rank records an event when its gradients are ready, and the
    summing rank's stream waits for it. A cross-device copy runs on the calling thread's current stream of
    the source device, so that stream is made to wait as well.
    """

    def __init__(
        self,
        world: int,
        *,
        scope: Scope | None = None,
        deadline_s: float = 600.0,
        decide_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.world = world
        self._deadline_s = deadline_s
        self._decide_stop = decide_stop
        self._condition = threading.Condition()
        self._seats: dict[int, _Seat] = {}
        self._summed: dict[int, torch.cuda.Event | None] = {}
        self._round: Round | None = None
        self._number = 0
        self._leaving = 0
        self._cancelled = False
        if scope is not None:
            scope.on_cancel(self.cancel)

    def cancel(self) -> None:
        """Wake everyone who waits here with Cancelled."""
        with self._condition:
            self._cancelled = True
            self._condition.notify_all()

    def reduce(self, rank: int, grads: torch.Tensor, stats: torch.Tensor, note: Any = None) -> Round:
        """See `GradientExchange.reduce`."""
        deadline = time.monotonic() + self._deadline_s
        seats, decided = self._arrive(rank, _Seat((grads, stats), note, _record(grads)), deadline)
        if self.world > 1:
            for index in range(2):
                _sum_slice(rank, self.world, seats, index)
        for done in self._finish(rank, _record(grads), deadline):
            if done is not None:
                torch.cuda.current_stream(grads.device).wait_event(done)
        return decided

    def _arrive(self, rank: int, seat: _Seat, deadline: float) -> tuple[list[_Seat], Round]:
        with self._condition:
            # A fast rank may come back for the next round before the slow ones have left this one.
            self._wait(lambda: self._leaving == 0, rank, deadline)
            if rank in self._seats:
                raise ValueError(f"rank {rank} came twice in round {self._number}")
            self._seats[rank] = seat
            if len(self._seats) == self.world:
                notes = tuple(self._seats[r].note for r in range(self.world))
                self._round = Round(self._number, self._decide_stop(), notes)
                self._condition.notify_all()
            self._wait(lambda: self._round is not None, rank, deadline)
            assert self._round is not None
            return [self._seats[r] for r in range(self.world)], self._round

    def _finish(self, rank: int, done: torch.cuda.Event | None, deadline: float) -> Sequence[torch.cuda.Event | None]:
        with self._condition:
            self._summed[rank] = done
            if len(self._summed) == self.world:
                self._leaving = self.world
                self._condition.notify_all()
            self._wait(lambda: self._leaving > 0, rank, deadline)
            events = [self._summed[r] for r in range(self.world)]
            self._leaving -= 1
            if self._leaving == 0:
                self._seats.clear()
                self._summed.clear()
                self._round = None
                self._number += 1
                self._condition.notify_all()
            return events

    def _wait(self, ready: Callable[[], bool], rank: int, deadline: float) -> None:
        while not ready():
            if self._cancelled:
                raise Cancelled("the gradient exchange was cancelled")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                came = self._seats if self._round is None else self._summed
                missing = [f"drafter{r}" for r in range(self.world) if r not in came]
                raise Stalled(f"gradient exchange {self._number}: {', '.join(missing)} did not come in time")
            self._condition.wait(remaining)
        if self._cancelled:
            raise Cancelled("the gradient exchange was cancelled")


def _record(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """An event on the calling thread's stream after the work queued so far; None on CPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def _sum_slice(rank: int, world: int, seats: list[_Seat], index: int) -> None:
    """Sum slice `rank` of tensor `index` over all seats in rank order, in fp32 or wider, and write it to all."""
    own = seats[rank].tensors[index]
    length = own.numel()
    bounds = slice(length * rank // world, length * (rank + 1) // world)
    if bounds.start == bounds.stop:
        return
    with torch.no_grad():
        for seat in seats:
            if seat.ready is not None:
                device = seat.tensors[index].device
                torch.cuda.current_stream(device).wait_event(seat.ready)
                torch.cuda.current_stream(own.device).wait_event(seat.ready)
        wide = torch.float64 if own.dtype == torch.float64 else torch.float32
        total = torch.zeros(bounds.stop - bounds.start, dtype=wide, device=own.device)
        for seat in seats:
            total += seat.tensors[index].view(-1)[bounds].to(own.device, non_blocking=True)
        for seat in seats:
            seat.tensors[index].view(-1)[bounds].copy_(total, non_blocking=True)
