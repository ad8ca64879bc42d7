"""Hand-over of weights to verifiers, and the clock of a stage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.channel import Closed
from trainer.scope import Cancelled, Scope
from trainer.stages.verifier import SnapshotBox, WeightSnapshot

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
