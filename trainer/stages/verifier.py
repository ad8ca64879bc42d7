"""VerifierLoop: acceptance length of the newest weights on held-out documents, while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from trainer.channel import Closed
from trainer.gate import Gate
from trainer.parts import Evaluate, Evaluation
from trainer.scope import Cancelled, Scope
from trainer.stages.clock import StageClock


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """A copy of drafter 0's weights after a step."""

    step: int
    weights: dict[str, torch.Tensor]
    last: bool = False
    """The run's last one: it is evaluated whatever happens before it."""

    @classmethod
    def of(cls, step: int, weights: dict[str, torch.Tensor], *, last: bool = False) -> WeightSnapshot:
        """Take over a copy made on the caller's stream, and wait for it: evaluation points only."""
        for device in {value.device for value in weights.values() if value.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return cls(step, weights, last)


class SnapshotBox:
    """Hands the newest snapshot to whichever verifier is free.

    A snapshot that nobody has taken is replaced by a newer one: verifiers that are slower than training skip
    points instead of falling behind. The last one closes the box and is never dropped.
    """

    def __init__(self, scope: Scope | None = None) -> None:
        self._condition = threading.Condition()
        self._snapshot: WeightSnapshot | None = None
        self._closed = False
        self._cancelled = False
        if scope is not None:
            scope.on_cancel(self.cancel)

    def publish(self, snapshot: WeightSnapshot) -> None:
        """Offer a snapshot; no-op after the last one."""
        with self._condition:
            if self._closed:
                return
            self._snapshot = snapshot
            self._closed = snapshot.last
            self._condition.notify_all()

    def drop(self) -> None:
        """Forget a snapshot that nobody has taken: a newer one is about to be made. The last one stays."""
        with self._condition:
            if not self._closed:
                self._snapshot = None

    def take(self) -> WeightSnapshot:
        """Wait for a snapshot. Raises Closed when the last one was taken, Cancelled when nobody wants more."""
        with self._condition:
            self._condition.wait_for(lambda: self._snapshot is not None or self._closed or self._cancelled)
            if self._cancelled:
                raise Cancelled("no more evaluations are wanted")
            if self._snapshot is None:
                raise Closed("the last snapshot was taken")
            taken, self._snapshot = self._snapshot, None
            return taken

    def cancel(self) -> None:
        """Nobody will look at further evaluations."""
        with self._condition:
            self._cancelled = True
            self._snapshot = None
            self._condition.notify_all()


class VerifierLoop:
    """Evaluates the weights that training starts with as its warm-up, then whatever is published."""

    def __init__(
        self,
        rank: int,
        make_evaluate: Callable[[], Evaluate],
        rules: Callable[[], AbstractContextManager[Any]],
        first: Callable[[], WeightSnapshot],
        box: SnapshotBox,
        gate: Gate,
        clock: StageClock,
        on_result: Callable[[int, Evaluation, float], None],
    ) -> None:
        self._rank = rank
        self._make_evaluate = make_evaluate
        self._rules = rules
        self._first = first
        self._box = box
        self._gate = gate
        self._clock = clock
        self._on_result = on_result

    @property
    def name(self) -> str:
        return f"verifier{self._rank}"

    def run(self) -> None:
        """The thread's life."""
        with ExitStack() as life:
            with self._gate.turn(self.name):
                life.enter_context(self._rules())
                evaluate = self._make_evaluate()
                # All verifiers compile here; one of them speaks.
                self._evaluate(evaluate, self._first(), report=self._rank == 0)
            with self._clock.state("input"):
                self._gate.wait_open()
            self._clock.follow_device()
            while True:
                try:
                    with self._clock.state("input"):
                        snapshot = self._box.take()
                except Closed:
                    self._clock.rest()
                    return
                with self._clock.state("busy", batch=True):
                    self._evaluate(evaluate, snapshot, report=True)
                del snapshot  # while the next one is waited for, its weights would take room

    def _evaluate(self, evaluate: Evaluate, snapshot: WeightSnapshot, *, report: bool) -> None:
        began = time.monotonic()
        evaluation = evaluate(snapshot.weights, last=snapshot.last)
        if report:
            self._on_result(snapshot.step, evaluation, time.monotonic() - began)
