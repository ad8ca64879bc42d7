"""Gradient exchange: fixed order, identical replicas, nobody hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import collectives
from trainer.collectives import NcclSum, Seat, bound, choose
from trainer.config import ConfigError
from trainer.reduce import Drifted, InProcessExchange, Round
from trainer.scope import Cancelled, Scope, Stalled

WAIT_S = 120.0


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


@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_slices_and_pieces(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above with several pieces to a slice; fails when a slice's last, shorter piece is left out."""
    monkeypatch.setattr(collectives, "PIECE", 96)
    generator = torch.Generator().manual_seed(world)
    grads = [torch.randn(1000, generator=generator) * 10.0 ** (2 * r) for r in range(world)]
    expected = grads[0].clone()
    for other in grads[1:]:
        expected += other
    exchange_all(world, grads, [torch.ones(6) for _ in range(world)])
    assert all(torch.equal(g, expected) for g in grads)


@given(length=st.integers(0, 10_000), world=st.integers(1, 9))
def test_slices_cover_a_buffer_once(length: int, world: int) -> None:
    bounds = [bound(length, r, world) for r in range(world + 1)]
    assert bounds[0] == 0
    assert bounds[-1] == length
    assert bounds == sorted(bounds)
    assert all(b % collectives.ALIGN == 0 for b in bounds[:-1])


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


class TestAgreement:
    """Before a checkpoint the replicas compare checksums of their weights."""

    def agree(self, values: list[int]) -> Scope:
        scope = Scope()
        exchange = InProcessExchange(len(values), scope=scope, deadline_s=WAIT_S)

        def replica(rank: int) -> None:
            exchange.reduce(rank, torch.ones(3), torch.ones(1))
            exchange.agree(rank, values[rank], 500)
            exchange.reduce(rank, torch.ones(3), torch.ones(1))

        for rank in range(len(values)):
            scope.go(f"drafter{rank}", lambda rank=rank: replica(rank))
        assert scope.wait(WAIT_S), scope.alive()
        return scope

    def test_equal_replicas_go_on(self) -> None:
        assert self.agree([7, 7, 7]).error is None
        assert self.agree([7]).error is None

    def test_a_drifted_replica_ends_the_run(self) -> None:
        """Fails when only drafter 0 compares with drafter 1."""
        error = self.agree([-7, -7, 8]).error
        assert error is not None
        assert isinstance(error.cause, Drifted)
        assert "after step 500" in str(error)
        assert "drafter2 0000000000000008" in str(error)
        assert "--resume auto" in str(error)


@pytest.mark.parametrize(
    ("wanted", "drafters", "others", "how"),
    [
        ("auto", ["cuda:2", "cuda:3"], ["cuda:0"], "nccl"),
        ("auto", ["cuda:0", "cuda:1"], ["cuda:0"], "peer"),
        ("auto", ["cuda:1", "cuda:1"], ["cuda:0"], "peer"),
        ("auto", ["cpu", "cpu"], ["cpu"], "peer"),
        ("auto", ["cuda:2"], ["cuda:0"], "peer"),
        ("peer", ["cuda:2", "cuda:3"], ["cuda:0"], "peer"),
        ("nccl", ["cuda:0", "cuda:1"], ["cuda:0"], "nccl"),
    ],
)
def test_the_way_of_the_exchange(
    wanted: str, drafters: list[str], others: list[str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "nccl_built", lambda: True)
    assert choose(wanted, drafters, others) == how


def test_nccl_by_name_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"two or more GPUs.*cpu, cpu"):
        choose("nccl", ["cpu", "cpu"], ["cpu"])


class OnDevice(Seat):
    """A seat whose note says on which device it pretends to be."""

    @property
    def device(self) -> torch.device:
        return torch.device(self.note)


class FakeStream:
    """Remembers what was queued on it."""

    def __init__(self, log: list[tuple[Any, ...]], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: Any) -> None:
        self.log.append(("wait", self.name, event))


def test_nccl_sums_the_drafters_of_a_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five drafters on three devices, NCCL itself replaced by a sum in rank order. Every buffer's owner must have been
    waited for before the collective; fails without the wait in `_gather`, or without `_spread`."""
    log: list[tuple[Any, ...]] = []

    @contextmanager
    def stream(which: FakeStream) -> Iterator[None]:
        log.append(("enter", which.name))
        yield

    def all_reduce(tensors: list[torch.Tensor], streams: list[FakeStream]) -> None:
        log.append(("nccl", tuple(s.name for s in streams)))
        total = sum(t.clone() for t in tensors)
        for tensor in tensors:
            tensor.copy_(total)

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", all_reduce)
    monkeypatch.setattr(collectives, "record", lambda tensor: "done")
    monkeypatch.setattr(collectives, "PIECE", 64)
    devices = ["cuda:1", "cuda:0", "cuda:1", "cuda:2", "cuda:1"]
    grads = [torch.full((200,), 2.0**r).bfloat16() for r in range(5)]
    seats = [
        OnDevice((grads[r], torch.full((7,), float(r))), devices[r], f"ready{r}", FakeStream(log, f"stream{r}"))
        for r in range(5)
    ]
    done = NcclSum().add(seats)
    assert set(done) == {torch.device(d) for d in devices}
    assert all(torch.equal(seat.tensors[0], torch.full((200,), 31.0).bfloat16()) for seat in seats)
    assert all(torch.equal(seat.tensors[1], torch.full((7,), 10.0)) for seat in seats)
    first = next(i for i, entry in enumerate(log) if entry[0] == "nccl")
    assert log[first] == ("nccl", ("stream0", "stream1", "stream3"))
    waits = {entry[1:] for entry in log[:first] if entry[0] == "wait"}
    assert waits == {
        ("stream0", "ready0"),
        ("stream0", "ready2"),
        ("stream0", "ready4"),
        ("stream1", "ready1"),
        ("stream3", "ready3"),
    }


def test_a_failing_sum_releases_the_others() -> None:
    """One drafter's card fails inside the sum; the others must not wait for their deadline."""
    scope = Scope()
    exchange = InProcessExchange(3, scope=scope, deadline_s=10 * WAIT_S)

    def replica(rank: int) -> None:
        exchange.reduce(rank, torch.ones(300), torch.ones(1))

    def add(rank: int, seats: Any) -> None:
        if rank == 1:
            raise RuntimeError("CUDA error")

    exchange._peer.add = add  # type: ignore[method-assign]
    for rank in range(3):
        scope.go(f"drafter{rank}", lambda rank=rank: replica(rank))
    assert scope.wait(WAIT_S), scope.alive()
    assert scope.error is not None
    assert scope.error.stage == "drafter1"
