"""TargetForwardLoop: the frozen target's hidden states, batch after batch, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
    ) -> None:
        self._make_target = make_target
        self._rules = rules
        self._inbox = inbox
        self._outboxes = outboxes
        self._gate = gate
        self._clock = clock

    def run(self) -> None:
        """The thread's life. Leaving for any reason frees the prefetcher, which may be waiting to put."""
        try:
            # No torch work before the gate: another thread may be compiling.
            with self._clock.state("input"):
                self._gate.wait_open()
            with self._rules(), torch.no_grad():
                self._clock.follow_device()
                self._forward_all(self._make_target())
        finally:
            self._inbox.cancel()
        for outbox in self._outboxes:
            outbox.close()

    def _forward_all(self, target: TargetModel) -> None:
        batches = iter(self._inbox)
        while True:
            with self._clock.state("input"):
                packed = next(batches, None)
            if packed is None:
                return
            with self._clock.state("busy", batch=True):
                hidden_TKH = target.hidden_states(packed)
            ready = None
            if hidden_TKH.is_cuda:
                ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                ready.record(torch.cuda.current_stream(hidden_TKH.device))
            with self._clock.state("output"):
                self._outboxes[packed.index % len(self._outboxes)].put(HiddenBatch(packed, hidden_TKH, ready))
