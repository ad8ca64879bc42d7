"""What a run leaves behind: its checkpoints, its evaluations, and which checkpoint is the best.

Checkpoints come from the writer's thread (and, when the loss diverges, from drafter 0's), evaluations from the
verifiers'. Either of a step may be there first; the best is told when both are.
"""

from __future__ import annotations

import threading
import time

from trainer.channel import Channel
from trainer.checkpoint import CheckpointStore, Snapshot
from trainer.config import TrainConfig
from trainer.events import Checkpoint, Eval
from trainer.metrics import Metrics
from trainer.parts import Evaluation
from trainer.summary import SummaryKeeper


class Outcomes:
    """Writes, reports and compares; every method may be called from any thread."""

    def __init__(
        self,
        config: TrainConfig,
        metrics: Metrics,
        store: CheckpointStore,
        keeper: SummaryKeeper,
        *,
        saved: str | None,
    ) -> None:
        """`saved` is the checkpoint that the run goes on from."""
        self._config = config
        self._metrics = metrics
        self._store = store
        self._keeper = keeper
        self._saved = saved
        self._save_lock = threading.Lock()
        self._result_lock = threading.Lock()
        self._results: dict[int, float] = {}

    def last_saved(self) -> str | None:
        """Path of the newest checkpoint; None where there is none yet."""
        return self._saved

    def write(self, snapshots: Channel[Snapshot]) -> None:
        """The life of the writer's thread."""
        for snapshot in snapshots:
            self.save(snapshot)

    def save(self, snapshot: Snapshot) -> str:
        """Write one checkpoint; returns its path. Raises CheckpointError."""
        began = time.monotonic()
        with self._save_lock:
            path = str(self._store.save(snapshot, self._config))
            self._saved = path
        step = snapshot.progress.step
        self._keeper.update(checkpoint=path)
        self._metrics.emit(Checkpoint(step=step, path=path, seconds=time.monotonic() - began))
        # The evaluation of these weights may have ended before they were on disk.
        with self._result_lock:
            accept_len = self._results.get(step)
        if accept_len is not None:
            self._best(step, accept_len)
        return path

    def evaluated(self, step: int, evaluation: Evaluation, seconds: float) -> None:
        """Report one evaluation."""
        if evaluation.blocks == 0:
            self._metrics.say(
                f"eval      step {step}: nothing to measure; no document is held out (data.heldout_documents, and at "
                "most a quarter of the data)"
            )
            return
        decoded = evaluation.decoded
        self._keeper.update(accept_len_first=evaluation.accept_len, accept_len_last=evaluation.accept_len)
        if decoded is not None:
            self._keeper.update(decode_accept_len=decoded.accept_len)
        self._metrics.emit(
            Eval(
                step=step,
                accept_len=evaluation.accept_len,
                by_position=evaluation.by_position,
                blocks=evaluation.blocks,
                seconds=seconds,
                decode_accept_len=decoded.accept_len if decoded else None,
                decode_by_position=decoded.by_position if decoded else None,
                decode_rounds=decoded.blocks if decoded else None,
            )
        )
        with self._result_lock:
            self._results[step] = evaluation.accept_len
        self._best(step, evaluation.accept_len)

    def _best(self, step: int, accept_len: float) -> None:
        if self._store.mark_best(step, accept_len):
            self._metrics.say(f"best      step {step} has the highest held-out acceptance length so far")
