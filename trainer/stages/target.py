"""TargetForwardLoop: the frozen target's hidden states, batch after batch, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from trainer.channel import Channel
from trainer.data.batch import HiddenBatch, PackedBatch
from trainer.gate import Gate
from trainer.parts import TargetModel
from trainer.stages.clock import StageClock


class TargetForwardLoop:
    """Takes its batches in order and sends batch i to drafter i mod D."""

    def __init__(
        self,
        make_target: Callable[[], TargetModel],
        rules: Callable[[], AbstractContextManager[Any]],
        inbox: Channel[PackedBatch],
        outboxes: Sequence[Channel[HiddenBatch]],
        gate: Gate,
        clock: StageClock,
        *,
        batches_held: int,
        name: str = "target0",
        warm_up: Callable[[TargetModel], None] | None = None,
    ) -> None:
        """`warm_up` compiles the target's forward, in the turn that the gate holds for `name`.

        `batches_held` of its results are alive at once, at most.
        """
        self._make_target = make_target
        self._rules = rules
        self._inbox = inbox
        self._outboxes = outboxes
        self._gate = gate
        self._clock = clock
        self._batches_held = batches_held
        self._name = name
        self._warm_up = warm_up

    def run(self) -> None:
        """The thread's life. Leaving for any reason frees the prefetcher, which may be waiting to put."""
        try:
            with ExitStack() as life:
                target = None
                if self._warm_up is not None:
                    with self._gate.turn(self._name):
                        target = self._enter(life)
                        self._warm_up(target)
                # No torch work before the gate outside of a turn: another thread may be compiling.
                with self._clock.state("input"):
                    self._gate.wait_open()
                if target is None:
                    target = self._enter(life)
                self._clock.follow_device()
                self._forward_all(target)
        finally:
            self._inbox.cancel()
        for outbox in self._outboxes:
            outbox.close()

    def _enter(self, life: ExitStack) -> TargetModel:
        life.enter_context(self._rules())
        life.enter_context(torch.no_grad())
        return self._make_target()

    def _forward_all(self, target: TargetModel) -> None:
        batches = iter(self._inbox)
        reserved = False
        while True:
            with self._clock.state("input"):
                packed = next(batches, None)
            if packed is None:
                self._clock.rest()
                return
            with self._clock.state("busy", batch=True):
                hidden_TKH = target.hidden_states(packed)
            ready = None
            if hidden_TKH.is_cuda:
                if not reserved:
                    # So that no later step asks for memory.
                    held = [torch.empty_like(hidden_TKH) for _ in range(self._batches_held - 1)]
                    reserved = True
                    del held
                ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                ready.record(torch.cuda.current_stream(hidden_TKH.device))
            with self._clock.state("output"):
                self._outboxes[packed.index % len(self._outboxes)].put(HiddenBatch(packed, hidden_TKH, ready))
