"""Compiling for one device, and capturing a step as CUDA graphs on the calling thread.

Compiled functions are kept per device: threads that share a device share the compiled code, and the cache of one
device's function never fills up with another's entries (Dynamo counts entries per code object).
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch

SETTLE_STEPS = 3
"""Uncaptured steps before a capture: allocator, autotuning and library handles come to rest in them."""

_lock = threading.Lock()
_functions: dict[tuple[Any, str, str | None, str], Any] = {}


def compiled(
    function: Callable[..., Any], device: torch.device, *, mode: str | None = None, label: str = ""
) -> Callable[..., Any]:
    """`function` compiled for one device: whole graph, static shapes; shared by all threads of that device.

    Nothing is compiled before the first call, which must happen under the gate. `label` keeps apart what is compiled
    under different settings of the compiler.
    """
    key = (function, str(device), mode, label)
    with _lock:
        if key not in _functions:
            plain = cast(types.FunctionType, function)
            clone = types.FunctionType(
                plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
            )
            _functions[key] = torch.compile(clone, fullgraph=True, dynamic=False, mode=mode)
        return cast(Callable[..., Any], _functions[key])


def recomputing(*, elementwise: bool) -> AbstractContextManager[None]:
    """What backward may compute again, for everything that is compiled inside; see `StepConfig.recompute`.

    Left alone, the partitioner keeps what a product of backward reads (the norms' outputs), since it has to exist
    there anyway. `elementwise` lets it be made again from what is kept besides: less memory, one more elementwise pass.
    What attention reads takes a checkpoint besides, in `Attention`: the partitioner does not repeat a concatenation.
    """
    if not elementwise:
        return nullcontext()
    import torch._functorch.config as partitioner

    made: AbstractContextManager[None] = partitioner.patch(ban_recompute_materialized_backward=False)
    return made


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step's two halves as CUDA graphs that share a memory pool; replayed on the thread that captured them."""

    accumulate_graph: torch.cuda.CUDAGraph
    apply_graph: torch.cuda.CUDAGraph
    thread: int

    @staticmethod
    def settle(accumulate: Callable[[], None], apply: Callable[[], None], steps: int = SETTLE_STEPS) -> None:
        """Run the halves uncaptured; the first round compiles."""
        for _ in range(steps):
            accumulate()
            apply()

    @classmethod
    def capture(
        cls,
        accumulate: Callable[[], None],
        apply: Callable[[], None],
        *,
        device: torch.device,
        capturing: Callable[[], None] = lambda: None,
    ) -> CapturedStep:
        """Settle, then capture both halves on the calling thread's current stream.

        The stream must not be the device's default one: AccumulateGrad nodes and the capture have to agree on it.
        `capturing` is called when all is settled and the first capture is about to begin.
        `thread_local`: another thread's unsafe call does not invalidate the capture; this thread's own does.
        """
        stream = torch.cuda.current_stream(device)
        if stream == torch.cuda.default_stream(device):
            raise RuntimeError(
                "a step must be captured on its thread's own stream; enter torch_setup.thread_rules first"
            )
        cls.settle(accumulate, apply)
        torch.cuda.synchronize(device)
        capturing()
        pool = torch.cuda.graph_pool_handle()
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        for graph, half in zip(graphs, (accumulate, apply), strict=True):
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                half()
        return cls(graphs[0], graphs[1], threading.get_ident())

    def accumulate(self) -> None:
        """Replay the first half."""
        self._replay(self.accumulate_graph)

    def apply(self) -> None:
        """Replay the second half."""
        self._replay(self.apply_graph)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        if threading.get_ident() != self.thread:
            raise RuntimeError(
                "a captured step was replayed from another thread than the one that captured it: its buffers, stream "
                "and pool belong to that thread"
            )
        graph.replay()
