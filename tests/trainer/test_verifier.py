"""Hand-over of weights to verifiers, and the clock of a stage."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.waiting import wait_until
from trainer.channel import Closed
from trainer.gate import Gate
from trainer.parts import Evaluation
from trainer.scope import Cancelled, Scope
from trainer.stages.clock import StageClock
from trainer.stages.verifier import SnapshotBox, VerifierLoop, WeightSnapshot

WAIT_S = 120.0


def snapshot(step: int, *, last: bool = False) -> WeightSnapshot:
    return WeightSnapshot.of(step, {"w": torch.tensor([float(step)])}, last=last)


class TestSnapshotBox:
    def test_the_newest_waits_and_older_ones_are_dropped(self) -> None:
        box = SnapshotBox()
        for step in (1, 2, 3):
            box.publish(snapshot(step))
        assert box.take().step == 3

    def test_the_last_closes_the_box_and_is_delivered(self) -> None:
        """Fails when `take` looks at `closed` before the snapshot."""
        box = SnapshotBox()
        box.publish(snapshot(1))
        box.publish(snapshot(2, last=True))
        box.publish(snapshot(3))
        assert box.take().step == 2
        with pytest.raises(Closed):
            box.take()

    def test_what_nobody_took_can_be_dropped_unless_it_is_the_last(self) -> None:
        box = SnapshotBox()
        first = snapshot(1)
        gone = weakref.ref(first.weights["w"])
        box.publish(first)
        del first
        assert gone() is not None
        box.drop()
        assert gone() is None
        box.publish(snapshot(2, last=True))
        box.drop()
        assert box.take().step == 2

    @settings(max_examples=20, deadline=None)
    @given(verifiers=st.integers(1, 4), published=st.integers(1, 30))
    def test_steps_rise_nothing_doubles_and_the_last_always_arrives(self, verifiers: int, published: int) -> None:
        scope = Scope()
        box = SnapshotBox(scope)
        seen: list[list[int]] = [[] for _ in range(verifiers)]

        def verify(rank: int) -> None:
            while True:
                try:
                    seen[rank].append(box.take().step)
                except Closed:
                    return

        def train() -> None:
            for step in range(published):
                box.publish(snapshot(step, last=step == published - 1))

        for rank in range(verifiers):
            scope.go(f"verifier{rank}", lambda rank=rank: verify(rank))
        scope.go("drafter0", train)
        assert scope.wait(WAIT_S)
        assert scope.error is None
        everything = [step for steps in seen for step in steps]
        assert len(everything) == len(set(everything))
        assert published - 1 in everything
        assert all(steps == sorted(steps) for steps in seen)

    def test_cancel_wakes_a_waiting_verifier(self) -> None:
        scope = Scope()
        box = SnapshotBox(scope)
        outcome: list[str] = []

        def verify() -> None:
            try:
                box.take()
            except Cancelled:
                outcome.append("cancelled")

        scope.go("verifier0", verify)
        scope.cancel()
        assert scope.wait(WAIT_S)
        assert outcome == ["cancelled"]


def test_evaluated_weights_are_let_go_while_the_next_are_waited_for() -> None:
    """Copies of a drafter's weights: gigabytes on its device. Failed while the loop kept its last snapshot."""
    scope, box = Scope(), SnapshotBox()
    weights: list[weakref.ref[torch.Tensor]] = []
    evaluated = threading.Event()
    gate = Gate(["verifier0"], deadline_s=WAIT_S, on_overdue=lambda overdue: None, scope=scope)

    def made(step: int, *, last: bool = False) -> WeightSnapshot:
        found = snapshot(step, last=last)
        weights.append(weakref.ref(found.weights["w"]))
        return found

    loop = VerifierLoop(
        0,
        lambda: lambda weights, *, last: Evaluation(1.0, [], 0),
        nullcontext,
        lambda: made(0),
        box,
        gate,
        StageClock("cpu"),
        lambda step, evaluation, seconds: evaluated.set() if step else None,
    )
    scope.go("verifier0", loop.run)
    gate.wait_open()
    box.publish(made(1))
    assert evaluated.wait(WAIT_S)
    wait_until(lambda: all(ref() is None for ref in weights), "both copies are gone")
    box.publish(made(2, last=True))
    assert scope.wait(WAIT_S)
    assert scope.error is None
