"""A stage's timeline: on the host by the clock, on a device by what its stream reached.

Shown able to fail: with a device stage timed by the host's clock, `test_a_host_that_runs_ahead...` finds the target
waiting 90 % of the time; with only finished waits counted, `test_a_wait_that_spans_readings...` finds none; without
`rest` an ended stage spends its time on something else.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NoReturn, cast

import pytest

from trainer.channel import Channel
from trainer.data.batch import PackedBatch
from trainer.gate import Gate, Overdue
from trainer.parts import TargetModel
from trainer.stages.clock import HostTimeline, StageClock, StageTimes
from trainer.stages.prefetch import BatchPrefetcher
from trainer.stages.target import TargetForwardLoop


@dataclass
class Wall:
    """Time that passes when a test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Device:
    """A stream: work is queued by the host and done in order, each piece after the one before it."""

    def __init__(self, wall: Wall) -> None:
        self.wall = wall
        self.free = 0.0

    def launch(self, seconds: float) -> float:
        """Queue work; returns when it will be done."""
        self.free = max(self.free, self.wall.now) + seconds
        return self.free

    def mark(self) -> float:
        return self.launch(0.0)

    def reached(self, mark: float) -> bool:
        return mark <= self.wall.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait_event(self, event: float) -> None:
        self.free = max(self.free, self.wall.now, event)


def on_host() -> tuple[Wall, StageClock]:
    wall = Wall()
    return wall, StageClock(timeline=HostTimeline(wall))


def on_device() -> tuple[Wall, Device, StageClock]:
    wall = Wall()
    device = Device(wall)
    return wall, device, StageClock("cuda:0", timeline=device)


class TestOnTheHost:
    def test_every_second_is_in_one_state(self) -> None:
        wall, clock = on_host()
        wall.now = 1.0
        with clock.state("input"):
            wall.now = 3.0
        with clock.state("busy", batch=True):
            wall.now = 7.0
        with clock.state("output"):
            wall.now = 7.5
        with clock.state("exchange"):
            wall.now = 8.0
        assert clock.read() == StageTimes(4.0, 2.0, 0.5, 0.5, 1.0, batches=1, exchanges=((0, 0.5),))

    def test_a_wait_that_spans_readings_counts_in_each(self) -> None:
        wall, clock = on_host()
        with clock.state("input"):
            wall.now = 2.0
            assert clock.read().input == 2.0
            wall.now = 5.0
            assert clock.read().input == 3.0
            wall.now = 6.0
        assert clock.read().input == 1.0
        assert clock.read().elapsed == 0.0

    def test_an_exchange_that_spans_readings_is_one(self) -> None:
        wall, clock = on_host()
        with clock.state("exchange"):
            wall.now = 2.0
            assert clock.read().exchanges == ()
            wall.now = 3.0
        with clock.state("exchange"):
            wall.now = 4.0
        assert clock.read().exchanges == ((0, 3.0), (1, 1.0))

    def test_work_that_fails_is_no_batch(self) -> None:
        _, clock = on_host()
        with pytest.raises(ValueError), clock.state("busy", batch=True):
            raise ValueError
        assert clock.read().batches == 0

    def test_shares_of_nothing_are_nothing(self) -> None:
        assert StageTimes().share(0.0) == 0.0
        assert StageTimes(busy=1.0).share(2.0) == 1.0


class TestAnEndedStage:
    """It has nothing to do, which is no work of its own: else the last report would call it the slowest."""

    def gate(self) -> Gate:
        def never(overdue: Overdue) -> NoReturn:
            raise AssertionError(overdue)

        return Gate([], deadline_s=60.0, on_overdue=never)

    def test_the_prefetcher(self) -> None:
        wall, clock = on_host()
        outbox: Channel[PackedBatch] = Channel(1)
        BatchPrefetcher(lambda: iter(()), range(0), [outbox], self.gate(), clock).run()
        wall.now = 5.0
        assert clock.read() == StageTimes(input=5.0)

    def test_the_target(self) -> None:
        wall, clock = on_host()
        inbox: Channel[PackedBatch] = Channel(1)
        inbox.close()
        TargetForwardLoop(
            lambda: cast(TargetModel, None), nullcontext, inbox, [], self.gate(), clock, batches_held=1
        ).run()
        wall.now = 5.0
        assert clock.read() == StageTimes(input=5.0)


class TestOnADevice:
    def test_a_host_that_runs_ahead_of_a_busy_device_does_not_make_it_wait(self) -> None:
        """The target: its thread queues a forward of 10 s in 1 s and waits 9 s for room; the device never rests."""
        wall, device, clock = on_device()
        for _ in range(20):
            with clock.state("busy", batch=True):
                device.launch(10.0)
                wall.now += 1.0
            with clock.state("output"):
                wall.now += 9.0
        wall.now += 100.0
        times = clock.read()
        assert times.busy == pytest.approx(200.0)
        assert times.batches == 20
        assert times.output == pytest.approx(0.0)

    def test_a_device_that_rests_because_its_host_waits_waits(self) -> None:
        wall, device, clock = on_device()
        for _ in range(10):
            with clock.state("input"):
                wall.now += 4.0
            with clock.state("busy", batch=True):
                device.launch(3.0)
                wall.now += 1.0
        wall.now += 10.0
        times = clock.read()
        assert times.busy == pytest.approx(30.0)
        # Of the 4 s before each forward 2 s belong to the forward before it, and the first has none before.
        assert times.input == pytest.approx(4.0 + 9 * 2.0)

    def test_a_device_that_waits_for_another_one_waits_though_its_host_does_not(self) -> None:
        """The drafter: its batch is there at once, the states in it are written 5 s later."""
        wall, device, clock = on_device()
        for number in range(10):
            with clock.state("input"):
                clock.wait_event(10.0 * number + 5.0)
            with clock.state("busy", batch=True):
                device.launch(2.0)
        wall.now = 200.0
        times = clock.read()
        assert times.busy == pytest.approx(20.0)
        assert times.input == pytest.approx(5.0 + 9 * 8.0)

    def test_launches_that_come_too_late_are_neither_work_nor_waiting(self) -> None:
        wall, device, clock = on_device()
        for _ in range(5):
            with clock.state("busy", batch=True):
                device.launch(1.0)
            wall.now += 3.0
        with clock.state("input"):
            pass
        times = clock.read()
        assert times.busy == pytest.approx(5.0)
        assert times.other == pytest.approx(5 * 2.0)

    def test_what_is_not_reached_yet_counts_at_the_next_reading(self) -> None:
        wall, device, clock = on_device()
        with clock.state("busy", batch=True):
            device.launch(10.0)
        wall.now = 4.0
        assert clock.read() == StageTimes()
        wall.now = 11.0
        times = clock.read()
        assert (times.busy, times.batches) == (pytest.approx(10.0), 1)
