"""Gradient exchange: fixed order, identical replicas, nobody hangs."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.reduce import InProcessExchange, Round
from trainer.scope import Cancelled, Scope, Stalled

WAIT_S = 30.0


def exchange_all(world: int, grads: list[torch.Tensor], stats: list[torch.Tensor], rounds: int = 1) -> list[Round]:
    scope = Scope()
    exchange = InProcessExchange(world, scope=scope, deadline_s=WAIT_S)
    last: dict[int, Round] = {}

    def replica(rank: int) -> None:
        for _ in range(rounds):
            last[rank] = exchange.reduce(rank, grads[rank], stats[rank], note=f"note{rank}")

    for rank in range(world):
        scope.go(f"drafter{rank}", lambda rank=rank: replica(rank))
    assert scope.wait(WAIT_S), scope.alive()
    assert scope.error is None
    return [last[rank] for rank in range(world)]


@settings(max_examples=30, deadline=None)
@given(world=st.integers(1, 5), length=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_sum_in_rank_order_and_bit_identical(world: int, length: int, seed: int) -> None:
    """Fails when a slice is added starting with the own replica: fp32 addition does not associate."""
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(length, generator=generator) * 10.0 ** (3 * r) for r in range(world)]
    stats = [torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(world)]
    expected = torch.zeros(length)
    expected_stats = torch.zeros(6, dtype=torch.float64)
    for r in range(world):
        expected = expected + grads[r]
        expected_stats = expected_stats + stats[r]
    if world == 1:
        expected, expected_stats = grads[0].clone(), stats[0].clone()
    exchange_all(world, grads, stats)
    for r in range(world):
        assert torch.equal(grads[r], expected)
        assert torch.equal(stats[r], expected_stats)


def test_many_rounds_without_mixing() -> None:
    """A fast replica may arrive for the next round while a slow one leaves; fails without the `_leaving` wait."""
    grads = [torch.ones(7) for _ in range(3)]
    stats = [torch.ones(2) for _ in range(3)]
    rounds = exchange_all(3, grads, stats, rounds=20)
    assert all(torch.equal(g, torch.full((7,), 3.0**20)) for g in grads)
    assert {r.number for r in rounds} == {19}
    assert rounds[0].notes == ("note0", "note1", "note2")


def test_the_stop_decision_is_one_for_all() -> None:
    """The flag flips while the round runs; all replicas must still read the same answer."""
    asked = []

    def decide() -> bool:
        asked.append(True)
        return len(asked) % 2 == 1

    scope = Scope()
    exchange = InProcessExchange(4, scope=scope, deadline_s=WAIT_S, decide_stop=decide)
    answers: list[bool] = []
    for rank in range(4):
        scope.go(
            f"drafter{rank}", lambda rank=rank: answers.append(exchange.reduce(rank, torch.ones(1), torch.ones(1)).stop)
        )
    assert scope.wait(WAIT_S)
    assert answers == [True] * 4
    assert len(asked) == 1


def test_a_dead_replica_wakes_the_others() -> None:
    scope = Scope()
    exchange = InProcessExchange(3, scope=scope, deadline_s=WAIT_S)
    outcomes: list[str] = []
    entered = threading.Barrier(3)

    def waiter(rank: int) -> None:
        entered.wait(WAIT_S)
        try:
            exchange.reduce(rank, torch.ones(3), torch.ones(1))
        except Cancelled:
            outcomes.append("cancelled")
            raise

    def dies() -> None:
        entered.wait(WAIT_S)
        raise RuntimeError("the replica is gone")

    scope.go("drafter0", lambda: waiter(0))
    scope.go("drafter1", lambda: waiter(1))
    scope.go("drafter2", dies)
    assert scope.wait(WAIT_S)
    assert outcomes == ["cancelled", "cancelled"]
    assert scope.error is not None
    assert scope.error.stage == "drafter2"


def test_a_late_replica_is_named() -> None:
    exchange = InProcessExchange(2, deadline_s=0.01)
    with pytest.raises(Stalled, match="drafter1 did not come"):
        exchange.reduce(0, torch.ones(1), torch.ones(1))


def test_bfloat16_is_summed_in_fp32() -> None:
    """256 + 0.5 + 0.5 + ... loses every half in bf16; fails with `total` in the gradient's own type."""
    grads = [torch.tensor([256.0]).bfloat16()] + [torch.tensor([0.5]).bfloat16() for _ in range(4)]
    exchange_all(5, grads, [torch.zeros(1) for _ in range(5)])
    assert [g.item() for g in grads] == [258.0] * 5
