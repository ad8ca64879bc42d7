"""The gradient exchange between drafters of one device or of several, alone and between the two halves of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.trainer.gpu.setting import DEVICE, DEVICES, as_drafter, gpu_batch, gpu_config, gpu_step, in_threads
from trainer.collectives import How
from trainer.config import TrainConfig
from trainer.reduce import InProcessExchange
from trainer.scope import Scope
from trainer.step import StepMetrics


def every_device() -> list[str]:
    return DEVICES or [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def in_drafters(devices: list[str], life: Callable[[int], Any], scope: Scope) -> list[Any]:
    """`life(rank)` on a drafter thread of each device; all results, or the first error that is not an echo."""

    def guarded(rank: int) -> Callable[[], Any]:
        def run() -> Any:
            try:
                return life(rank)
            except BaseException as error:
                scope.fail(f"drafter{rank}", error)
                raise

        return as_drafter(run, devices[rank])

    results = in_threads({f"drafter{rank}": guarded(rank) for rank in range(len(devices))})
    if scope.error is not None:
        raise scope.error
    return [results[f"drafter{rank}"] for rank in range(len(devices))]


def wrong_sums(how: How, devices: list[str], *, rounds: int = 60, length: int = 3_000_017) -> int:
    """Exchanges on busy streams beside memory that is filled and dropped; how many sums are wrong on any device."""
    scope = Scope()
    exchange = InProcessExchange(len(devices), scope=scope, deadline_s=60.0, how=how)
    turn, ready = threading.Lock(), threading.Barrier(len(devices))
    world = len(devices)

    def life(rank: int) -> int:
        device = devices[rank]
        with turn:
            grads = torch.zeros(length, dtype=torch.bfloat16, device=device)
            stats = torch.zeros(7, device=device)
            exchange.rehearse(rank, grads, stats)
            spin = torch.randn(1024, 1024, device=device)
            wrong = torch.zeros((), dtype=torch.int64, device=device)
        ready.wait(60)
        for index in range(rounds):
            # Small whole numbers: their sums are exact in bf16, in any order.
            grads.fill_(float((index + rank) % 11))
            grads[: length // 2] *= 2
            stats.fill_(float(rank + 1))
            for _ in range(2 + 3 * ((index + rank) % 2) if device != "cpu" else 0):
                spin = (spin @ spin).clamp(-1, 1)
            exchange.reduce(rank, grads, stats)
            poison = [torch.full((length,), -1.0, dtype=torch.bfloat16, device=device) for _ in range(3)]
            total = float(sum((index + r) % 11 for r in range(world)))
            wrong += (grads[length // 2 :] != total).sum() + (grads[: length // 2] != 2 * total).sum()
            wrong += (stats != world * (world + 1) / 2).sum()
            del poison
        return int(wrong)

    return sum(in_drafters(devices, life, scope))


def exchange_on_one_device() -> None:
    assert wrong_sums("peer", [DEVICE] * 3) == 0


def peer_exchange_over_devices() -> None:
    assert wrong_sums("peer", every_device()) == 0
    assert wrong_sums("peer", [*every_device(), DEVICE]) == 0


def nccl_exchange_over_devices() -> None:
    assert wrong_sums("nccl", every_device()) == 0
    assert wrong_sums("nccl", [*every_device(), DEVICE]) == 0


def train_replicas(how: How, devices: list[str], config: TrainConfig, steps: int) -> None:
    """Replicas with the exchange between their two graphs end with equal bits, and do what one drafter with as many
    micro-steps does, to bf16 rounding."""
    scope = Scope()
    world = len(devices)
    exchange = InProcessExchange(world, scope=scope, deadline_s=120.0, how=how)
    turn, together = threading.Lock(), threading.Barrier(world)

    def life(rank: int) -> tuple[list[StepMetrics], int]:
        device = devices[rank]
        with turn:
            step = gpu_step(config, device)
            step.warm_up()
            exchange.rehearse(rank, step.grads, step.stats)
            batches = [gpu_batch(config, index * world + rank, device) for index in range(4)]
        together.wait(240)
        metrics = []
        for index in range(steps):
            step.load(batches[index % 4])
            step.accumulate()
            exchange.reduce(rank, step.grads, step.stats)
            step.apply()
            metrics.append(step.metrics())
        exchange.agree(rank, step.fingerprint(), steps)
        return metrics, step.fingerprint()

    results = in_drafters(devices, life, scope)
    assert len({fingerprint for _, fingerprint in results}) == 1
    assert all(metrics == results[0][0] for metrics, _ in results)

    alone = replace(config, optim=replace(config.optim, micro_steps=world))

    def one_big_batch() -> list[StepMetrics]:
        step = gpu_step(alone, devices[0])
        step.warm_up()
        batches = [gpu_batch(config, index, devices[0]) for index in range(4 * world)]
        metrics = []
        for index in range(steps):
            for rank in range(world):
                step.load(batches[index % 4 * world + rank])
                step.accumulate()
            step.apply()
            metrics.append(step.metrics())
        return metrics

    (reference,) = in_drafters(devices[:1], lambda rank: one_big_batch(), Scope())
    for mine, other in zip(results[0][0], reference, strict=True):
        assert (mine.tokens, mine.blocks) == (other.tokens, other.blocks)
        assert abs(mine.loss - other.loss) < 0.02 * abs(other.loss)
    first, other = results[0][0][0], reference[0]
    print("first step", first.loss, other.loss, first.grad_norm, other.grad_norm)
    assert abs(first.grad_norm - other.grad_norm) < 0.02 * other.grad_norm


def replicas_by_peer_copies() -> None:
    train_replicas("peer", every_device(), gpu_config(), 3 if DEVICE == "cpu" else 30)


def replicas_by_nccl() -> None:
    train_replicas("nccl", every_device(), gpu_config(), 30)
