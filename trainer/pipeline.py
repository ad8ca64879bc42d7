"""The pipeline: threads, channels and their order, from the first warm-up to the last evaluation.

    BatchPrefetcher -> [T' channels] -> TargetForwardLoop x T' -> [T' x D channels] -> DrafterTrainLoop x D
                                                                                         | weights
                                                                  VerifierLoop x V  <----+

Routing is fixed by the batch's number: batch i is computed by target i mod T' and trained on by drafter
i mod D, through one channel for each (target, drafter) pair. Every thread handles its batches in ascending
order, so no result depends on which thread was faster.

Why it cannot deadlock: let m be the smallest batch number that its drafter has not consumed. Every channel
holds ascending numbers, so nothing stands before m in any channel that m passes, and whoever handles m never
waits for a smaller one: the prefetcher's and the target's put of m find an empty channel. Drafter m mod D is
not waiting for the gradient exchange of an earlier step either: a step's batches are consecutive numbers, all
smaller than m are consumed, so all drafters reach that exchange. Hence m is always on its way. With data.reuse
"consumed" means taken: all drafters follow one plan, so what they take for a step is consecutive numbers still, and
what they keep in their reservoirs stands in nobody's way.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from trainer.balance import stages_of
from trainer.channel import Channel
from trainer.checkpoint import CheckpointStore, Loaded, Progress, Snapshot
from trainer.collectives import choose
from trainer.config import ConfigError, TrainConfig, to_dict
from trainer.data.batch import HiddenBatch, PackedBatch
from trainer.data.reuse import ReusePlan
from trainer.events import Capture, End, GateOpen, Warmup
from trainer.foreseen import FORESEEN
from trainer.gate import GATE_DEADLINE_EXIT, Gate, Overdue
from trainer.leader import Diverged, RunLeader
from trainer.memory import batches_held
from trainer.metrics import Metrics
from trainer.outcomes import Outcomes
from trainer.parts import Parts
from trainer.reduce import Drifted, InProcessExchange
from trainer.scope import Scope, Stalled
from trainer.stages.clock import StageClock
from trainer.stages.drafter import DrafterTrainLoop
from trainer.stages.prefetch import BatchPrefetcher, DataEnded
from trainer.stages.target import TargetForwardLoop
from trainer.stages.verifier import SnapshotBox, VerifierLoop
from trainer.summary import SummaryKeeper

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
TOLD = (Diverged, Drifted, DataEnded, Stalled, *FORESEEN)
"""Errors whose message says all; everything else is logged with its traceback."""
LEAVE_S = 10.0
"""Seconds that the other threads get to end after an error."""


class Pipeline:
    """One run's threads. `run` returns the exit code; `request_stop` may come from any thread."""

    def __init__(
        self,
        config: TrainConfig,
        parts: Parts,
        metrics: Metrics,
        store: CheckpointStore,
        *,
        resumed: Loaded | None = None,
        process_began: float | None = None,
        alarm: bool = False,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._progress = resumed.progress if resumed else Progress(step=0, next_batch=0, cursor=None)
        self._process_began = time.monotonic() if process_began is None else process_began
        self._stop_reason: str | None = None
        saved = str(resumed.path) if resumed else None
        self._keeper = SummaryKeeper()
        self._outcomes = Outcomes(config, metrics, store, self._keeper, saved=saved)
        self._keeper.update(
            steps=self._progress.step,
            tokens=self._progress.tokens,
            loss_first=self._progress.loss_first,
            accept_len_first=self._progress.accept_len_first,
            checkpoint=saved,
        )
        self.scope = Scope()
        self._box = SnapshotBox(self.scope)
        self._build(parts, resumed, alarm)

    def _build(self, parts: Parts, resumed: Loaded | None, alarm: bool) -> None:
        config, run, topology = self._config, self._config.run, self._config.topology
        targets, drafters = len(topology.target), len(topology.drafter)
        verifiers = topology.evaluating
        depth, stall_s = run.queue_depth, run.stall_deadline_s
        packed: list[Channel[PackedBatch]] = [
            Channel(depth, name=f"prefetcher -> target{t}", scope=self.scope, deadline_s=stall_s)
            for t in range(targets)
        ]
        hidden: list[list[Channel[HiddenBatch]]] = [
            [
                Channel(depth, name=f"target{t} -> drafter{d}", scope=self.scope, deadline_s=stall_s)
                for d in range(drafters)
            ]
            for t in range(targets)
        ]
        saves: Channel[Snapshot] = Channel(1, name="checkpoints", scope=self.scope)
        clocks = {stage.name: StageClock(stage.device) for stage in stages_of(topology)}
        self._gate = Gate(
            [
                *(f"drafter{d}" for d in range(drafters)),
                *(f"target{t}" for t in range(targets) if parts.warm_target is not None),
                *(f"verifier{v}" for v in range(len(verifiers))),
            ],
            deadline_s=run.gate_deadline_s,
            on_overdue=self._leave_overdue,
            on_ready=self._warmed,
            on_open=self._opened,
            scope=self.scope,
            alarm=alarm,
        )
        exchange = InProcessExchange(
            drafters,
            scope=self.scope,
            deadline_s=stall_s,
            decide_stop=lambda: self._stop_reason is not None,
            how=choose(run.exchange, topology.drafter, (*topology.target, *verifiers)),
        )
        self._leader = RunLeader(
            config,
            emit=self._metrics.emit,
            keeper=self._keeper,
            box=self._box,
            saves=saves,
            clocks=clocks,
            queues={
                **{channel.name: channel for channel in packed},
                **{channel.name: channel for row in hidden for channel in row},
            },
            progress=self._progress,
            save_now=self._outcomes.save,
            last_saved=self._outcomes.last_saved,
        )
        self._on_gate_open = parts.on_gate_open
        first, last, micro_steps = self._progress.step, run.max_steps, config.optim.micro_steps
        plan = ReusePlan.of(config.data)
        self._stages: dict[str, Callable[[], None]] = {
            "prefetcher": BatchPrefetcher(
                lambda: parts.open_source(self._progress.cursor),
                range(plan.oldest(first * micro_steps) * drafters, plan.taken(last * micro_steps) * drafters),
                packed,
                self._gate,
                clocks["prefetcher"],
            ).run,
            "checkpoint-writer": lambda: self._outcomes.write(saves),
        }
        for t, device in enumerate(topology.target):
            self._stages[f"target{t}"] = TargetForwardLoop(
                lambda t=t: parts.target(t),  # type: ignore[misc]  # mypy cannot infer a lambda with a default
                lambda device=device: parts.thread_rules("target", device),  # type: ignore[misc]  # as above
                packed[t],
                hidden[t],
                self._gate,
                clocks[f"target{t}"],
                batches_held=batches_held(config),
                name=f"target{t}",
                warm_up=parts.warm_target,
            ).run
        for d, device in enumerate(topology.drafter):
            self._stages[f"drafter{d}"] = DrafterTrainLoop(
                d,
                lambda d=d: parts.step(d),  # type: ignore[misc]  # as above
                lambda device=device: parts.thread_rules("drafter", device),  # type: ignore[misc]  # as above
                [row[d] for row in hidden],
                exchange,
                self._gate,
                clocks[f"drafter{d}"],
                drafters=drafters,
                micro_steps=micro_steps,
                steps=range(first, last),
                plan=plan,
                cursor=self._progress.cursor,
                state=resumed.optimizer if resumed else None,
                leader=self._leader if d == 0 else None,
                check_every=run.checkpoint_every,
                on_capture=lambda name: self._metrics.emit(Capture(thread=name)),
            ).run
        for v, device in enumerate(verifiers):
            self._stages[f"verifier{v}"] = VerifierLoop(
                v,
                lambda v=v: parts.evaluator(v),  # type: ignore[misc]  # as above
                lambda device=device: parts.thread_rules("verifier", device),  # type: ignore[misc]  # as above
                self._leader.first_snapshot,
                self._box,
                self._gate,
                clocks[f"verifier{v}"],
                self._outcomes.evaluated,
            ).run

    @property
    def step(self) -> int:
        """The last logged step."""
        return self._keeper.summary.steps

    def request_stop(self, reason: str) -> None:
        """Finish the running step, save and end. During warm-up there is nothing to finish: leave at once."""
        if not self._gate.is_open:
            self._metrics.say(f"{reason} during warm-up: nothing was trained, nothing to save")
            self._leave(End(reason="stopped", exit_code=EXIT_DONE, step=self._progress.step))
        self._metrics.say(f"{reason}: finishing this step, then saving")
        self._stop_reason = reason
        self.scope.notify()

    def run(self) -> int:
        """Start every thread, wait for the end, say how it ended. Returns the exit code."""
        for name, function in self._stages.items():
            self.scope.go(name, function)

        def trains(name: str) -> bool:
            return not name.startswith("verifier")

        def stopping() -> bool:
            return self._stop_reason is not None

        error: str | None = None
        self.scope.wait_until(stopping, only=trains)
        evaluated = self.scope.wait_until(stopping, self._config.run.eval_deadline_s, only=lambda name: True)
        if not self.scope.cancelled and stopping():
            if not self.scope.wait(self._config.run.stop_deadline_s, only=trains):
                error = (
                    f"no orderly stop within run.stop_deadline_s ({self._config.run.stop_deadline_s:.0f} s); "
                    f"still running: {', '.join(self.scope.alive())}"
                )
        elif not evaluated:
            error = (
                f"the last evaluation did not end within run.eval_deadline_s "
                f"({self._config.run.eval_deadline_s:.0f} s); the checkpoint is complete"
            )
        if self.scope.error is not None:
            self.scope.wait(LEAVE_S)
            error = self._describe_error()
        self.scope.cancel()
        return self._finish(error)

    def _finish(self, error: str | None) -> int:
        summary = self._keeper.summary
        reason = "error" if error else "stopped" if self._stop_reason else "done"
        cause = self.scope.error.cause if self.scope.error is not None else None
        # Some settings are refused only where the drafter that they do not fit is built.
        failed = EXIT_CONFIG if isinstance(cause, ConfigError) else EXIT_ERROR
        code = failed if error else EXIT_DONE
        for line in summary.lines():
            self._metrics.say(line)
        self._metrics.emit(
            End(reason=reason, exit_code=code, step=summary.steps, error=error, summary=to_dict(summary))
        )
        self._metrics.close()
        return code

    def _describe_error(self) -> str:
        assert self.scope.error is not None
        cause = self.scope.error.cause
        if not isinstance(cause, TOLD):
            self._metrics.say("".join(traceback.format_exception(cause)))
        lines = [str(self.scope.error)]
        lines += [f"afterwards: {later}" for later in self.scope.later_errors]
        if self.scope.alive():
            lines.append(f"did not end in {LEAVE_S:.0f} s: {', '.join(self.scope.alive())}")
        return "\n".join(lines)

    def _warmed(self, name: str, seconds: float) -> None:
        self._metrics.emit(Warmup(thread=name, seconds=seconds))

    def _opened(self) -> None:
        self._on_gate_open()
        # What lives now lives to the end; without it a full collection stops every thread now and then.
        gc.collect()
        gc.freeze()
        self._leader.gate_opened()
        self._metrics.emit(GateOpen(seconds=time.monotonic() - self._process_began))

    def _leave_overdue(self, overdue: Overdue) -> NoReturn:
        self._metrics.say(overdue.stacks)
        self._leave(
            End(
                reason="gate_deadline",
                exit_code=GATE_DEADLINE_EXIT,
                step=self._progress.step,
                culprit=overdue.culprit,
                error=f"the warm-up of {overdue.culprit} did not end within run.gate_deadline_s "
                f"({overdue.after_s:.0f} s); the stacks of all threads are above",
            )
        )

    def _leave(self, end: End) -> NoReturn:
        # Not sys.exit: threads that hang in a compile or a driver call would keep the interpreter from ending.
        self._metrics.emit(end)
        os._exit(end.exit_code)
