"""Several drafter threads on one device: the same compiled step with and without CUDA graphs.

Host time matters here: a plain launch needs the interpreter for every kernel, a replay once a step.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from trainer import torch_setup
from trainer.bench.drafter import kernel_parts
from trainer.bench.shapes import SHAPES, bench_config, bench_step, random_batch

STEPS = 100


@dataclass(frozen=True, slots=True)
class ThreadsResult:
    """All threads together, each with its own step."""

    shape: str
    threads: int
    graphs: str
    step_ms: float
    """Wall time of one step of one thread."""
    steps_per_s: float
    """Of all threads together."""
    host_ms: float
    """CPU time of the process for one step."""
    kernels: float
    """GPU kernels, copies and fills of one step."""


@dataclass(frozen=True, slots=True)
class ThreadsRatio:
    """Whole-step graphs against the same compiled step launched plainly, both of this process."""

    shape: str
    threads: int
    speedup: float
    """Steps a second of all threads, step over none."""
    host_ratio: float
    """CPU time of a step, step over none."""

    @classmethod
    def of(cls, plain: ThreadsResult, graphed: ThreadsResult) -> ThreadsRatio:
        return cls(
            plain.shape,
            plain.threads,
            graphed.steps_per_s / plain.steps_per_s,
            graphed.host_ms / max(plain.host_ms, 1e-9),
        )


def bench_threads(name: str, threads: int, graphs: str, device: torch.device, *, steps: int) -> ThreadsResult:
    """Warm the threads one at a time, then let all of them run `steps` steps."""
    shape = SHAPES[name]
    config = bench_config(shape, 1, attention="flex", graphs=graphs, device=device)
    turn, ready, done = threading.Lock(), threading.Barrier(threads + 1), threading.Barrier(threads + 1)
    errors: list[BaseException] = []
    kernels: list[float] = []

    def life(rank: int) -> None:
        try:
            with torch_setup.thread_rules("drafter", device):
                with turn:
                    step = bench_step(shape, config, device)
                    step.warm_up()
                    batches = [random_batch(shape, config, 1, index, device) for index in range(2)]

                    def whole(index: int) -> None:
                        step.load(batches[index % 2])
                        step.accumulate()
                        step.apply()

                    whole(0)
                    if rank == 0 and device.type == "cuda":
                        kernels.append(kernel_parts(whole)["kernels"])
                ready.wait(600)
                for index in range(steps):
                    whole(index)
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
                done.wait(600)
        except BaseException as error:  # noqa: BLE001  # the caller raises it
            errors.append(error)
            ready.abort()
            done.abort()

    workers = [threading.Thread(target=life, args=(rank,), daemon=True) for rank in range(threads)]
    for worker in workers:
        worker.start()
    try:
        ready.wait(600)
        wall, host = time.perf_counter(), time.process_time()
        done.wait(600)
        wall, host = time.perf_counter() - wall, time.process_time() - host
    except threading.BrokenBarrierError:
        if errors:
            raise errors[0] from None
        raise
    for worker in workers:
        worker.join(60)
    return ThreadsResult(
        shape=name,
        threads=threads,
        graphs=graphs,
        step_ms=wall / steps * 1e3,
        steps_per_s=threads * steps / wall,
        host_ms=host / (threads * steps) * 1e3,
        kernels=kernels[0] if kernels else 0.0,
    )
