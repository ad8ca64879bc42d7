"""BatchPrefetcher: packs batches ahead of the targets, in the order of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.channel import Channel
from trainer.data.batch import PackedBatch
from trainer.gate import Gate
from trainer.parts import BatchSource
from trainer.stages.clock import StageClock


class DataEnded(Exception):
    """The source had fewer batches than the run needs."""


class BatchPrefetcher:
    """Sends batch i to target i mod T', for i in `batches`, then closes the channels."""

    def __init__(
        self,
        open_source: Callable[[], BatchSource],
        batches: range,
        outboxes: Sequence[Channel[PackedBatch]],
        gate: Gate,
        clock: StageClock,
    ) -> None:
        self._open_source = open_source
        self._batches = batches
        self._outboxes = outboxes
        self._gate = gate
        self._clock = clock

    def run(self) -> None:
        """The thread's life."""
        with self._clock.state("input"):
            self._gate.wait_open()
        source = self._open_source()
        for index in self._batches:
            try:
                with self._clock.state("busy", batch=True):
                    packed = next(source)
            except StopIteration:
                raise DataEnded(f"the data ended before batch {index}; {len(self._batches)} were needed") from None
            if packed.index != index:
                raise ValueError(f"the data source gave batch {packed.index} where batch {index} was due")
            with self._clock.state("output"):
                self._outboxes[index % len(self._outboxes)].put(packed)
        for outbox in self._outboxes:
            outbox.close()
        self._clock.rest()
