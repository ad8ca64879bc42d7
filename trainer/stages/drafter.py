"""DrafterTrainLoop: one drafter replica, from its warm-up to the last step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.channel import Channel, Closed
from trainer.data.batch import HiddenBatch
from trainer.data.reuse import ReusePlan
from trainer.gate import Gate
from trainer.parts import DrafterStep
from trainer.reduce import GradientExchange, Round
from trainer.stages.clock import StageClock
from trainer.stages.prefetch import DataEnded


@dataclass(frozen=True, slots=True)
class Consumed:
    """What one drafter used up in one step; the leader sees those of all drafters."""

    cursor: dict[str, Any] | None
    """Of the last batch that will not be needed again; None: there is none yet. The last drafter's is the newest."""
    skipped: dict[str, int]
    """Documents left out so far, by reason."""
    tokens: int
    """Context tokens that were trained on for the first time, and blocks likewise."""
    blocks: int
    tokens_again: int
    """Those of batches that were trained on before (data.reuse)."""
    blocks_again: int


class Leader(Protocol):
    """What drafter 0 does for all: log, publish weights, save."""

    def ready(self, step: DrafterStep) -> None:
        """After the warm-up, still inside the gate."""
        ...

    def reserve(self, step: DrafterStep) -> None:
        """When the gate has opened: take the memory that will be needed."""
        ...

    def after_step(self, number: int, step: DrafterStep, decided: Round) -> None:
        """After every applied step."""
        ...


class DrafterTrainLoop:
    """Trains on batches rank, rank + D, rank + 2 D, ... as `plan` says, `micro_steps` times a step.

    `cursor` is where the data source stands before the oldest batch that the first step needs.
    """

    def __init__(
        self,
        rank: int,
        make_step: Callable[[], DrafterStep],
        rules: Callable[[], AbstractContextManager[Any]],
        inboxes: Sequence[Channel[HiddenBatch]],
        exchange: GradientExchange,
        gate: Gate,
        clock: StageClock,
        *,
        drafters: int,
        micro_steps: int,
        steps: range,
        plan: ReusePlan,
        cursor: dict[str, Any] | None,
        state: dict[str, Any] | None,
        leader: Leader | None,
        check_every: int,
        on_capture: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._make_step = make_step
        self._rules = rules
        self._inboxes = inboxes
        self._exchange = exchange
        self._gate = gate
        self._clock = clock
        self._drafters = drafters
        self._micro_steps = micro_steps
        self._steps = steps
        self._plan = plan
        self._cursor = cursor
        self._taken = plan.oldest(steps.start * micro_steps)
        self._reservoir: dict[int, HiddenBatch] = {}
        self._skipped: dict[str, int] = {}
        self._state = state
        self._leader = leader
        self._check_every = check_every
        self._on_capture = on_capture

    @property
    def name(self) -> str:
        return f"drafter{self._rank}"

    def run(self) -> None:
        """The thread's life. Leaving for any reason frees the targets, which may be waiting to put."""
        try:
            with ExitStack() as life:
                with self._gate.turn(self.name):
                    life.enter_context(self._rules())
                    step = self._warm_step()
                with self._clock.state("input"):
                    self._gate.wait_open()
                self._clock.follow_device()
                self._reserve(step)
                self._train(step)
        finally:
            for inbox in self._inboxes:
                inbox.cancel()

    def _warm_step(self) -> DrafterStep:
        step = self._make_step()
        if self._state is not None:
            step.load_state_dict(self._state)
            self._state = None  # it may be tens of gigabytes
        step.warm_up(lambda: self._on_capture(self.name))
        self._exchange.rehearse(self._rank, step.grads, step.stats)
        if self._leader is not None:
            self._leader.ready(step)
        return step

    def _reserve(self, step: DrafterStep) -> None:
        """Checkpoints and evaluations get their memory now, so that it is flat from the first step on.

        Not in the warm-up: a capture empties the allocator's cache, so the last drafter's would take it away again.
        """
        step.fingerprint()  # reads the masters in pieces, as a checkpoint does
        if self._leader is not None:
            self._leader.reserve(step)

    def _train(self, step: DrafterStep) -> None:
        for number in self._steps:
            tokens, blocks = [0, 0], [0, 0]  # for the first time, again
            for place in range(number * self._micro_steps, (number + 1) * self._micro_steps):
                own, before = self._plan.at(place)
                batch = self._batch(own).time(before)
                tokens[before > 0] += batch.packed.tokens
                blocks[before > 0] += int(batch.packed.keep_N.sum())  # a CPU tensor: no device is waited for
                with self._clock.state("busy", batch=True):
                    step.load(batch)
                    step.accumulate()
                self._let_go(self._plan.oldest(place + 1))
                del batch  # while the next one is waited for, its states would take room
            consumed = Consumed(self._cursor, self._skipped, tokens[0], blocks[0], tokens[1], blocks[1])
            with self._clock.state("exchange"):
                decided = self._exchange.reduce(self._rank, step.grads, step.stats, consumed)
            with self._clock.state("busy"):
                step.apply()
            self._check(number + 1, step, decided)
            if self._leader is not None:
                self._leader.after_step(number + 1, step, decided)
            if decided.stop:
                return

    def _check(self, number: int, step: DrafterStep, decided: Round) -> None:
        """Before a checkpoint, all drafters compare their weights."""
        due = decided.stop or number == self._steps.stop or number % self._check_every == 0
        if due and self._drafters > 1:
            fingerprint = step.fingerprint()
            with self._clock.state("exchange"):
                self._exchange.agree(self._rank, fingerprint, number)

    def _batch(self, own: int) -> HiddenBatch:
        """This drafter's batch `own`; taken from the targets, with those before it, when it is needed first."""
        while self._taken <= own:
            taken = self._reservoir[self._taken] = self._next(self._taken * self._drafters + self._rank)
            self._skipped = taken.packed.cursor.get("skipped", {})
            self._taken += 1
        return self._reservoir[own]

    def _let_go(self, oldest: int) -> None:
        """Drop what is older, and remember where the data stood after the newest of it."""
        for own in [own for own in self._reservoir if own < oldest]:
            self._cursor = self._reservoir.pop(own).packed.cursor

    def _next(self, index: int) -> HiddenBatch:
        inbox = self._inboxes[index % len(self._inboxes)]
        try:
            with self._clock.state("input"):
                batch = inbox.get()
                self._clock.wait_event(batch.ready)
        except Closed:
            raise DataEnded(f"{inbox.name} was closed before batch {index}") from None
        if batch.packed.index != index:
            raise ValueError(f"{inbox.name} gave batch {batch.packed.index} where batch {index} was due")
        return batch
