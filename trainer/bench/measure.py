"""How the benchmarks measure: device events, medians, several inputs, a ceiling from the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Of several repeats of one piece of work."""

    median_ms: float
    best_ms: float
    worst_ms: float
    repeats: int


class BenchError(RuntimeError):
    """A benchmark that cannot run here or whose result would be wrong; says what to do."""


def time_work(work: Callable[[int], None], device: torch.device, *, repeats: int, warm: int = 2) -> Timing:
    """Time `work(i)` for i = 0..; the index lets it rotate among input sets. Events on a GPU, the clock on a CPU."""
    return time_alternately([work], device, repeats=repeats, warm=warm)[0]


def time_alternately(
    works: Sequence[Callable[[int], None]], device: torch.device, *, repeats: int, warm: int = 2
) -> list[Timing]:
    """Time several pieces of work in turn, so that a machine that slows down slows all of them."""
    for index in range(warm):
        for work in works:
            work(index)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    times: list[list[float]] = [[] for _ in works]
    for index in range(repeats):
        for work, found in zip(works, times, strict=True):
            found.append(_time_once(work, index, device))
    return [Timing(statistics.median(found), min(found), max(found), repeats) for found in times]


def _time_once(work: Callable[[int], None], index: int, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        work(index)
        return (time.perf_counter() - began) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    begin.record()
    work(index)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def matmul_ceiling(device: torch.device, size: int = 8192) -> float:
    """TFLOP/s of a square bf16 product through torch on random data: what the other numbers are a share of."""
    if device.type != "cuda":
        size = 1024
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pairs = [tuple(torch.randn(size, size, device=device, dtype=dtype) for _ in range(2)) for _ in range(3)]
    out = torch.empty(size, size, device=device, dtype=dtype)
    timing = time_work(lambda i: _product(pairs[i % 3], out), device, repeats=20, warm=5)
    return 2 * size**3 / (timing.median_ms * 1e-3) / 1e12


def _product(pair: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    torch.mm(pair[0], pair[1], out=out)
