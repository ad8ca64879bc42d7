"""Hand-offs between threads and their streams, and the clock that times a stage by its device."""

from __future__ import annotations

import queue
import time
from typing import Any

import torch

from tests.trainer.gpu.setting import DEVICE, as_drafter, gpu_batch, gpu_config, gpu_step, in_threads, on_one_thread
from trainer import torch_setup
from trainer.data.batch import HiddenBatch
from trainer.stages.clock import StageClock, StageTimes


def wrong_values_after_hand_offs(*, waits: bool, source: str = DEVICE) -> int:
    """A producer thread fills, hands over and drops states, both streams busy; how many values arrive wrong."""
    config = gpu_config("none")
    channel: queue.Queue[Any] = queue.Queue(maxsize=2)
    rounds = 200
    template = gpu_batch(config, 0)

    def produce() -> None:
        spin = torch.randn(2048, 2048, device=source)
        for index in range(rounds):
            for _ in range(3):
                spin = (spin @ spin).clamp(-1, 1)
            hidden = torch.empty_like(template.hidden_TKH, device=source)
            hidden.fill_(float(index % 128))
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream())
            channel.put(HiddenBatch(template.packed, hidden, ready if waits else None))
            del hidden
            poison = [torch.full_like(template.hidden_TKH, -1.0, device=source) for _ in range(4)]
            del poison

    def consume() -> int:
        step = gpu_step(config)
        wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        spin = torch.randn(4096, 4096, device=DEVICE)
        for index in range(rounds):
            batch = channel.get(timeout=60)
            spin = (spin @ spin).clamp(-1, 1)
            step.load(batch)
            del batch
            wrong += (step.inputs.hidden_TKH != float(index % 128)).sum()
        return int(wrong)

    def target() -> None:
        with torch_setup.thread_rules("target", source):
            produce()

    results = in_threads({"target": target, "drafter": as_drafter(consume)})
    assert results["target"] is None, results
    assert isinstance(results["drafter"], int), results
    return results["drafter"]


def hidden_states_survive_the_hand_off() -> None:
    assert wrong_values_after_hand_offs(waits=True) == 0


def hidden_states_cross_devices() -> None:
    """Needs two GPUs: the copy runs on the drafter's private stream of the target's device."""
    assert wrong_values_after_hand_offs(waits=True, source="cuda:1") == 0


def a_hand_off_without_its_event_is_noticed() -> None:
    """So that the case above is known to be able to fail."""
    assert wrong_values_after_hand_offs(waits=False) > 0


def a_stage_is_timed_by_its_device() -> None:
    """A host that runs ahead of a busy device; then a stream that waits for another one while its host does not."""
    cycles = 100_000_000  # some 50 ms

    def ahead() -> StageTimes:
        clock = StageClock(DEVICE)
        torch.cuda._sleep(1000)
        torch.cuda.synchronize(DEVICE)
        clock.follow_device()
        for _ in range(10):
            with clock.state("busy", batch=True):
                torch.cuda._sleep(cycles)
            with clock.state("output"):
                time.sleep(0.005)
        torch.cuda.synchronize(DEVICE)
        return clock.read()

    def behind() -> StageTimes:
        clock, other = StageClock(DEVICE), torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.cuda.synchronize(DEVICE)
        clock.follow_device()
        for _ in range(10):
            with torch.cuda.stream(other):
                torch.cuda._sleep(cycles)
                ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
                ready.record()
            with clock.state("input"):
                clock.wait_event(ready)
            with clock.state("busy", batch=True):
                torch.cuda._sleep(1000)
        torch.cuda.synchronize(DEVICE)
        return clock.read()

    busy, starved = on_one_thread(ahead, "target"), on_one_thread(behind)
    print(busy, starved)
    assert (busy.batches, starved.batches) == (10, 10)
    assert busy.share(busy.busy) > 0.9
    assert starved.share(starved.input) > 0.9
