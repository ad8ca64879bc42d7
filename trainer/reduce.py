"""Gradient exchange between the drafter replicas of one process: who meets when, and what they agree on.

Every replica brings one flat gradient tensor and one small vector of sums (loss numerator, denominator,
counts). After the exchange all of them hold the same totals, bit for bit, so replicas that start equal and apply
equal steps stay equal; `agree` makes sure of it at every checkpoint. How the sums are made is
`trainer.collectives`' business.

A replica without a single valid anchor joins with zeros. A replica that died cancels the scope, which wakes
the others; one that is merely late runs into the deadline. All waits here are on one condition, which gives up the
interpreter lock; nobody waits for a device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer.collectives import How, NcclSum, PeerSum, Seat, record
from trainer.scope import Cancelled, Scope, Stalled


class Drifted(Exception):
    """The replicas no longer hold the same weights."""


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

    def rehearse(self, rank: int, grads: torch.Tensor, stats: torch.Tensor) -> None:
        """Inside the rank's turn at the gate: what the first exchange would set up is set up with the last rank's."""
        ...

    def reduce(self, rank: int, grads: torch.Tensor, stats: torch.Tensor, note: Any = None) -> Round:
        """Replace `grads` and `stats` by their sums over all ranks.

        Raises Cancelled when the scope ended, Stalled when a replica did not come in time.
        """
        ...

    def agree(self, rank: int, fingerprint: int, step: int) -> None:
        """Called by all ranks after the same step. Raises Drifted unless all bring the same fingerprint."""
        ...


class InProcessExchange:
    """The exchange between threads, on CPU and between the GPUs of one host."""

    def __init__(
        self,
        world: int,
        *,
        scope: Scope | None = None,
        deadline_s: float = 600.0,
        decide_stop: Callable[[], bool] = lambda: False,
        how: How = "peer",
    ) -> None:
        self.world = world
        self._deadline_s = deadline_s
        self._decide_stop = decide_stop
        self._peer = PeerSum()
        self._nccl = NcclSum() if how == "nccl" else None
        self._condition = threading.Condition()
        self._seats: dict[int, Seat] = {}
        self._summed: dict[int, Any] = {}
        self._round: Round | None = None
        self._number = 0
        self._leaving: set[int] = set()
        self._cancelled = False
        if scope is not None:
            scope.on_cancel(self.cancel)

    def cancel(self) -> None:
        """Wake everyone who waits here with Cancelled."""
        with self._condition:
            self._cancelled = True
            self._condition.notify_all()

    def rehearse(self, rank: int, grads: torch.Tensor, stats: torch.Tensor) -> None:
        """See `GradientExchange.rehearse`. The buffers are zero, and stay so.

        The last rank acts for all, on their streams: they wait at the gate. NCCL builds its communicator, loads its
        kernels and connects the devices at the first call; beside running targets that could hang (see `choose`).
        """
        with self._condition:
            self._seats[rank] = Seat.of((grads, stats), None)
            if len(self._seats) < self.world:
                return
            seats = [self._seats[r] for r in range(self.world)]
            self._seats.clear()
        if self.world == 1 or seats[0].ready is None:
            return
        if self._nccl is not None:
            self._nccl.add(seats)
        else:
            self._peer.rehearse(seats)
        for device in dict.fromkeys(seat.device for seat in seats):
            torch.cuda.synchronize(device)

    def reduce(self, rank: int, grads: torch.Tensor, stats: torch.Tensor, note: Any = None) -> Round:
        """See `GradientExchange.reduce`."""
        deadline = time.monotonic() + self._deadline_s
        seats, decided = self._arrive(rank, Seat.of((grads, stats), note), deadline)
        done: Any = None
        if self.world > 1:
            if self._nccl is None:
                self._peer.add(rank, seats)
                done = record(grads)
            elif rank == 0:  # one thread for all devices; any would do
                done = self._nccl.add(seats)
        for event in self._finish(rank, done, deadline):
            if isinstance(event, dict):
                event = event[grads.device]
            if event is not None:
                torch.cuda.current_stream(grads.device).wait_event(event)
        return decided

    def agree(self, rank: int, fingerprint: int, step: int) -> None:
        """See `GradientExchange.agree`."""
        if self.world == 1:
            return
        deadline = time.monotonic() + self._deadline_s
        seats, _ = self._arrive(rank, Seat((), fingerprint), deadline)
        self._finish(rank, None, deadline)
        values = [seat.note for seat in seats]
        if len(set(values)) > 1:
            told = ", ".join(f"drafter{r} {value & 0xFFFFFFFFFFFFFFFF:016x}" for r, value in enumerate(values))
            raise Drifted(
                f"the drafters no longer hold the same weights after step {step} (checksums: {told}); their gradients "
                "or updates differed, by a faulty card or an error in the exchange. Nothing was saved from this step: "
                "look at the cards' ECC counts and the kernel log, then go on from the last checkpoint with "
                "--resume auto (with run.exchange=peer, to rule out NCCL)"
            )

    def _arrive(self, rank: int, seat: Seat, deadline: float) -> tuple[list[Seat], Round]:
        with self._condition:
            # A fast rank may come back for the next round before the slow ones have left this one.
            self._wait(lambda: not self._leaving, rank, deadline)
            if rank in self._seats:
                raise ValueError(f"rank {rank} came twice in round {self._number}")
            self._seats[rank] = seat
            if len(self._seats) == self.world:
                notes = tuple(self._seats[r].note for r in range(self.world))
                stop = bool(seat.tensors) and self._decide_stop()
                self._round = Round(self._number, stop, notes)
                self._condition.notify_all()
            self._wait(lambda: self._round is not None, rank, deadline)
            assert self._round is not None
            return [self._seats[r] for r in range(self.world)], self._round

    def _finish(self, rank: int, done: Any, deadline: float) -> Sequence[Any]:
        with self._condition:
            self._summed[rank] = done
            if len(self._summed) == self.world:
                self._leaving = set(range(self.world))
                self._condition.notify_all()
            self._wait(lambda: bool(self._leaving), rank, deadline)
            events = [self._summed[r] for r in range(self.world)]
            self._leaving.discard(rank)
            if not self._leaving:
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
                absent = self._leaving or {r for r in range(self.world) if r not in came}
                missing = ", ".join(f"drafter{r}" for r in sorted(absent))
                raise Stalled(f"gradient exchange {self._number}: {missing} did not come in time")
            self._condition.wait(remaining)
        if self._cancelled:
            raise Cancelled("the gradient exchange was cancelled")
