"""What drafter 0 does for the whole run after a step: log, publish weights, save."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from trainer.balance import BalanceWatch, stages_of
from trainer.channel import Channel
from trainer.checkpoint import Progress, Snapshot, copy_to_cpu
from trainer.config import TrainConfig
from trainer.data.reuse import ReusePlan
from trainer.events import Event, Step
from trainer.memory import copies_held
from trainer.parts import DrafterStep, StepNumbers
from trainer.reduce import Round
from trainer.stages.clock import StageClock
from trainer.stages.drafter import Consumed
from trainer.stages.verifier import SnapshotBox, WeightSnapshot
from trainer.summary import SummaryKeeper


class Diverged(Exception):
    """The loss or the weights are no longer finite."""


class _Sized(Protocol):
    def __len__(self) -> int: ...


@dataclass(slots=True)
class _Passed:
    """What all drafters trained on: for the first time, and again (data.reuse)."""

    tokens: int = 0
    blocks: int = 0
    tokens_again: int = 0
    blocks_again: int = 0

    def add(self, step: Sequence[Consumed]) -> None:
        self.tokens += sum(c.tokens for c in step)
        self.blocks += sum(c.blocks for c in step)
        self.tokens_again += sum(c.tokens_again for c in step)
        self.blocks_again += sum(c.blocks_again for c in step)


class RunLeader:
    """Lives on drafter 0's thread; see `trainer.stages.drafter.Leader`."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        emit: Callable[[Event], None],
        keeper: SummaryKeeper,
        box: SnapshotBox,
        saves: Channel[Snapshot],
        clocks: Mapping[str, StageClock],
        queues: Mapping[str, _Sized],
        progress: Progress,
        save_now: Callable[[Snapshot], str],
        last_saved: Callable[[], str | None],
    ) -> None:
        self._config = config
        self._emit = emit
        self._keeper = keeper
        self._box = box
        self._saves = saves
        self._clocks = clocks
        self._queues = queues
        self._progress = progress
        self._save_now = save_now
        self._last_saved = last_saved
        self._balance = BalanceWatch(
            stages_of(config.topology), log_every=config.run.log_every, reuse=config.data.reuse
        )
        self._utilization = dict.fromkeys(clocks, 0.0)
        self._logged = progress.step
        self._first: WeightSnapshot | None = None
        self._began = self._window_began = time.monotonic()
        self._tokens = progress.tokens
        self._window, self._own = _Passed(), _Passed()
        self._plan = ReusePlan.of(config.data)

    def first_snapshot(self) -> WeightSnapshot:
        """The weights that training starts with."""
        if self._first is None:
            raise RuntimeError("drafter 0 has not warmed up")
        return self._first

    def ready(self, step: DrafterStep) -> None:
        """Keep the starting weights for the verifiers' warm-up."""
        self._first = WeightSnapshot.of(self._progress.step, step.weights())

    def reserve(self, step: DrafterStep) -> None:
        """Make as many copies of the weights as will ever be held."""
        held = [step.weights() for _ in range(copies_held(self._config))]
        del held

    def gate_opened(self) -> None:
        """Rates and shares count from here."""
        self._began = self._window_began = time.monotonic()
        self._first = None
        for clock in self._clocks.values():
            clock.read()

    def after_step(self, number: int, step: DrafterStep, decided: Round) -> None:
        """Log, publish and save what is due after optimizer step `number` (1-based)."""
        run = self._config.run
        consumed: list[Consumed] = list(decided.notes)
        self._tokens += sum(c.tokens for c in consumed)
        self._own.add(consumed)
        self._window.add(consumed)
        last = decided.stop or number == run.max_steps
        log = last or number % run.log_every == 0 or number == self._progress.step + 1
        save = last or number % run.checkpoint_every == 0
        if log or save:
            numbers = step.metrics()
            if not (math.isfinite(numbers.loss) and math.isfinite(numbers.grad_norm)):
                self._diverged(number, step, numbers, consumed[-1].cursor)
            if log:
                self._log(number, numbers, consumed[-1].skipped, last=last)
        evaluate = not decided.stop and (save or number % run.eval_every == 0)  # at saves: the best one can be told
        if decided.stop:
            self._box.cancel()  # a stop has seconds, an evaluation may need minutes
        if save or evaluate:
            self._box.drop()  # before there is another copy
            weights = step.weights()
            if evaluate:
                self._box.publish(WeightSnapshot.of(number, weights, last=last))
            if save:
                self._saves.put(self._snapshot(number, step, weights, consumed[-1].cursor), run.stall_deadline_s)
        if last:
            self._saves.close()

    def _log(self, number: int, numbers: StepNumbers, skipped: dict[str, int], *, last: bool) -> None:
        now = time.monotonic()
        elapsed = max(now - self._window_began, 1e-9)
        since_open = max(now - self._began, 1e-9)
        times = {name: clock.read() for name, clock in self._clocks.items()}
        # A stage that reached no mark since the last step is where it was.
        self._utilization |= {name: round(t.share(t.busy), 4) for name, t in times.items() if t.elapsed > 0}
        block, reuses = self._config.drafter.block_size, self._plan.times > 1
        self._keeper.update(
            steps=number,
            tokens=self._tokens,
            seconds=since_open,
            context_tokens_per_s=self._own.tokens / since_open,
            block_tokens_per_s=self._own.blocks * block / since_open,
            reused_context_tokens_per_s=self._own.tokens_again / since_open if reuses else None,
            skipped=skipped,
            loss_first=numbers.loss,
            loss_last=numbers.loss,
        )
        self._emit(
            Step(
                step=number,
                max_steps=self._config.run.max_steps,
                loss=numbers.loss,
                accept_len=numbers.accept_len,
                accuracy=numbers.accuracy,
                tokens=self._tokens,
                context_tokens_per_s=self._window.tokens / elapsed,
                block_tokens_per_s=self._window.blocks * block / elapsed,
                reused_context_tokens_per_s=self._window.tokens_again / elapsed if reuses else None,
                reused_block_tokens_per_s=self._window.blocks_again * block / elapsed if reuses else None,
                lr=numbers.lr,
                grad_norm=numbers.grad_norm,
                memory_gb=memory_gb(),
                memory=memory_by_device(),
                queues={name: len(queue) for name, queue in self._queues.items()},
                skipped_updates=number - numbers.step,
                utilization=dict(self._utilization),
            )
        )
        self._balance.add(number - self._logged, times)
        self._logged = number
        if balance := self._balance.due(number, last=last):
            self._keeper.update(balance=balance.text)
            self._emit(balance)
        self._window_began, self._window = now, _Passed()

    def _diverged(
        self, number: int, step: DrafterStep, numbers: StepNumbers, cursor: dict[str, Any] | None
    ) -> NoReturn:
        if numbers.updated:
            saved = self._last_saved()
            kept = f"the last good checkpoint is {saved}" if saved else "no checkpoint was due before"
        else:
            # The optimizer refused the update, so the weights are still those of the last good step.
            self._box.drop()
            saved = self._save_now(self._snapshot(number, step, step.weights(), cursor))
            kept = f"the weights before it are saved in {saved}"
        raise Diverged(
            f"loss {numbers.loss}, gradient norm {numbers.grad_norm} at step {number}; {kept}. Look at the data of the "
            "last batches (NaN in hidden states?), or lower optim.lr, and go on with --resume auto"
        )

    def _snapshot(
        self, number: int, step: DrafterStep, weights: dict[str, torch.Tensor], cursor: dict[str, Any] | None
    ) -> Snapshot:
        summary = self._keeper.summary
        progress = Progress(
            step=number,
            next_batch=self._plan.oldest(number * self._config.optim.micro_steps) * len(self._config.topology.drafter),
            cursor=cursor,
            tokens=self._tokens,
            loss_first=summary.loss_first,
            accept_len_first=summary.accept_len_first,
        )
        return copy_to_cpu(progress, weights, step.state_dict())


def memory_by_device() -> dict[str, dict[str, int]]:
    """What torch's allocator holds on each GPU that it was used on."""
    if not torch.cuda.is_available():
        return {}
    held = {
        f"cuda:{i}": {"reserved": torch.cuda.memory_reserved(i), "allocated": torch.cuda.max_memory_allocated(i)}
        for i in range(torch.cuda.device_count())
    }
    return {device: figures for device, figures in held.items() if figures["reserved"]}


def memory_gb() -> float:
    """GPU memory held by torch on the fullest device in GB; without a GPU, the peak resident memory.

    What the allocator has reserved, not what tensors occupy: the memory of a captured graph counts only there.
    """
    if torch.cuda.is_available():
        return max(torch.cuda.memory_reserved(i) for i in range(torch.cuda.device_count())) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9
