"""The drafter's training step: time, share of the matmul ceiling, peak memory, and where the time goes."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trainer.bench.measure import time_work
from trainer.bench.shapes import SHAPES, bench_config, bench_step, model_flops, random_batch
from trainer.config import StepConfig
from trainer.data.batch import HiddenBatch
from trainer.step import TrainStep


@dataclass(frozen=True, slots=True)
class DrafterResult:
    """One configuration's figures."""

    shape: str
    documents: int
    graphs: str
    fp8: bool
    recompute: str
    recompute_mlps: int
    warm_up_s: float
    accumulate_ms: float
    step_ms: float
    spread_ms: float
    """Slowest less fastest repeat."""
    sequences_per_s: float
    tflops: float
    of_ceiling: float
    peak_gb: float
    first_loss: float
    last_loss: float
    parts: dict[str, float] = field(default_factory=dict)
    """GPU milliseconds of one step by kind of kernel."""


def bench_drafter(
    name: str,
    documents: int,
    *,
    graphs: str,
    ceiling: float,
    device: torch.device,
    repeats: int = 12,
    profile: bool = False,
    options: StepConfig | None = None,
) -> DrafterResult:
    """Measure one configuration; call it on a thread that entered `thread_rules`."""
    shape = SHAPES[name]
    config = bench_config(shape, documents, attention="flex", graphs=graphs, device=device)
    config = replace(config, step=options or config.step)
    step = bench_step(shape, config, device)
    batches = [random_batch(shape, config, documents, index, device) for index in range(2)]
    _reset_peak(device)
    began = time.perf_counter()
    step.warm_up()
    warm_up_s = time.perf_counter() - began
    losses = [_one(step, batches[0])]
    accumulate = time_work(lambda i: step.accumulate(), device, repeats=max(3, repeats // 2))
    step.grads.zero_()
    step.stats.zero_()

    def whole(index: int) -> None:
        step.load(batches[index % 2])
        step.accumulate()
        step.apply()

    timing = time_work(whole, device, repeats=repeats)
    losses.append(_one(step, batches[0]))
    # Since before the capture: the memory of a graph is in use while it is captured and never seen again.
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
    tflops = model_flops(shape, documents) / (timing.median_ms * 1e-3) / 1e12
    parts = kernel_parts(whole) if profile and device.type == "cuda" else {}
    return DrafterResult(
        shape=name,
        documents=documents,
        graphs=graphs,
        fp8=config.step.fp8,
        recompute="elementwise" if config.elementwise_again else "none",
        recompute_mlps=config.step.recompute_mlps,
        warm_up_s=warm_up_s,
        accumulate_ms=accumulate.median_ms,
        step_ms=timing.median_ms,
        spread_ms=timing.worst_ms - timing.best_ms,
        sequences_per_s=documents / (timing.median_ms * 1e-3),
        tflops=tflops,
        of_ceiling=tflops / ceiling,
        peak_gb=peak,
        first_loss=losses[0],
        last_loss=losses[1],
        parts=parts,
    )


def _one(step: TrainStep, batch: HiddenBatch) -> float:
    step.load(batch)
    step.accumulate()
    step.apply()
    return step.metrics().loss


def _reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


Kinds = Sequence[tuple[str, tuple[str, ...]]]
"""(kind, parts of kernel names that tell it), the first match counts."""
KINDS: Kinds = (
    ("gemm", ("gemm", "nvjet", "cutlass", "cublas", "sm90_xmma", "wgmma")),
    ("flex", ("flex", "flash")),
    # Inductor names a fused kernel after its operations, casts ("to_copy") among them: it is no copy.
    ("triton", ("triton",)),
    ("copies", ("memcpy", "memset", "copy")),
)


def kernel_parts(work: Any, rounds: int = 2, kinds: Kinds = KINDS) -> dict[str, float]:
    """GPU milliseconds of one call by kind of kernel, and the number of launches, from torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for index in range(rounds):
            work(index)
        torch.cuda.synchronize()
    totals: dict[str, float] = defaultdict(float)
    launches = 0
    for event in profiler.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, marks in kinds if any(mark in name for mark in marks)), "other")
        totals[kind] += event.self_device_time_total / 1e3 / rounds
        launches += event.count
    return {kind: round(ms, 3) for kind, ms in totals.items()} | {"kernels": launches / rounds}
