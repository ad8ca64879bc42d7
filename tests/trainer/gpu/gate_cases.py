"""The gate and what it refuses: first calls of several threads, compiling and capturing at the wrong time or place."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.trainer.gpu.setting import (
    DEVICE,
    as_drafter,
    gpu_batch,
    gpu_config,
    gpu_step,
    in_threads,
    on_one_thread,
    train,
    warmed,
)
from trainer import torch_setup
from trainer.model.attention import DenseFallbackError
from trainer.step import StepMetrics


def shared_flex_first_calls(gated: bool, deadline_s: float) -> None:
    """Four threads make the first forward and backward of one compiled FlexAttention; with or without a turnstile."""
    torch.set_grad_enabled(True)
    attend = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    lock = threading.Lock()
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, DEVICE)

    def steps() -> float:
        torch.cuda.set_device(0)
        torch.cuda.set_stream(torch.cuda.Stream())

        def one() -> torch.Tensor:
            q, k, v = (torch.randn(1, 4, 512, 64, device=DEVICE, requires_grad=True) for _ in range(3))
            out = attend(q, k, v, block_mask=mask)
            out.sum().backward()
            return out

        if gated:
            with lock:
                one()
                torch.cuda.synchronize()
        for _ in range(20):
            out = one()
        return float(out.sum())

    results = in_threads({f"drafter{i}": steps for i in range(4)}, deadline_s)
    errors = [r for r in results.values() if isinstance(r, BaseException)]
    assert not errors, errors


def first_calls_at_once_without_a_gate() -> None:
    shared_flex_first_calls(gated=False, deadline_s=60.0)


def first_calls_through_a_gate() -> None:
    before = torch_setup.compile_counts()
    shared_flex_first_calls(gated=True, deadline_s=120.0)
    assert torch_setup.compile_counts().graphs - before.graphs == 1


def two_drafters_through_the_gate() -> None:
    """Two drafters of one device: the second compiles nothing, then both run freely under the stance."""
    config = gpu_config()
    lock, together = threading.Lock(), threading.Barrier(2)
    compiled: list[int] = []
    batches = [gpu_batch(config, i) for i in range(8)]

    def drafter() -> list[StepMetrics]:
        with lock:
            before = torch_setup.compile_counts().graphs
            step = gpu_step(config)
            step.warm_up()
            assert step.captured
            compiled.append(torch_setup.compile_counts().graphs - before)
        if together.wait(120) == 0:
            torch_setup.forbid_compilation()
        together.wait(120)
        counts = torch_setup.compile_counts()
        metrics = [m for _ in range(25) for m in train(step, batches)]
        torch_setup.check_nothing_compiled(counts)
        return metrics

    results = in_threads({f"drafter{i}": as_drafter(drafter) for i in range(2)})
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    one, two = results.values()
    print("graphs compiled by first and second:", compiled)
    assert compiled[0] >= 2
    assert compiled[1] == 0
    assert one == two
    assert one[-1].loss < one[0].loss


def replay_from_another_thread_is_refused() -> None:
    config = gpu_config()
    step = on_one_thread(lambda: warmed(config))
    step.load(gpu_batch(config, 0))
    with pytest.raises(RuntimeError, match="another thread"):
        step.accumulate()


def capture_on_the_default_stream_is_refused() -> None:
    torch_setup.apply_torch_config()
    step = gpu_step(gpu_config())
    with pytest.raises(RuntimeError, match="own stream"):
        step.warm_up()


def dense_fallback_is_refused() -> None:
    torch_setup.poison_dense_flex()

    def run() -> None:
        config = gpu_config("none")
        step = gpu_step(config)
        step.load(gpu_batch(config, 0))
        compiled = step._forward
        step._forward = compiled.__wrapped__
        with pytest.raises(DenseFallbackError):
            step.accumulate()
        step._forward = compiled
        step.warm_up()  # the compiled path does not meet the poison
        train(step, [gpu_batch(config, 0)])

    on_one_thread(run)


def a_new_shape_after_the_gate_is_refused() -> None:
    def run() -> None:
        config = gpu_config("none")
        step = warmed(config)
        torch_setup.forbid_compilation()
        step.load(gpu_batch(config, 0))
        step.accumulate()  # as it was warmed: nothing to refuse
        real = step._forward
        step._forward = lambda drafter, hidden_TKH, *rest: real(drafter, hidden_TKH[:-8], *rest)
        with pytest.raises(RuntimeError, match="recompile") as refused:
            step.accumulate()
        print(str(refused.value)[-300:])

    on_one_thread(run)


class Interrupted(Exception):
    """Ends a step after its forward."""


def warming_without_gradients_is_caught() -> None:
    def run() -> None:
        config = gpu_config("none")
        step = gpu_step(config)
        step.load(gpu_batch(config, 0))
        real = step._forward

        def without_gradients(*args: Any) -> torch.Tensor:
            with torch.no_grad():
                real(*args)
            raise Interrupted

        step._forward = without_gradients
        with pytest.raises(Interrupted):
            step.accumulate()
        step._forward = real
        torch_setup.forbid_compilation()
        with pytest.raises(RuntimeError, match="recompile") as refused:
            step.accumulate()
        print(str(refused.value)[-300:])

    on_one_thread(run)


def compiler_graphs() -> None:
    """On torch 2.11 refused with the reason; from 2.13 they work on a drafter's thread."""
    if torch_setup.supports_compiler_graphs(torch_setup.torch_version()):
        metrics = on_one_thread(lambda: train(warmed(gpu_config("compiler")), [gpu_batch(gpu_config(), 0)] * 3))
        assert metrics[-1].loss < metrics[0].loss
        return
    with pytest.raises(torch_setup.TorchUnfitError, match=r"2\.13"):
        gpu_step(gpu_config("compiler"))
