"""How this process uses torch: environment, thread rules, and every difference between torch versions.

One process, many threads, each with its own device role. torch was not built for that, so the rules are few and
absolute (docs/threads-and-compilation.md tells why):

- `set_environment()` runs before torch is imported; `apply_torch_config()` runs in main and first in every thread.
- A thread enters through `thread_rules`, which sets its device, stream, generator and autograd mode.
- Nobody runs torch work while another thread compiles or captures: that is the gate's business.
- Once the gate is open, `forbid_compilation()` turns every compile into an error that names its guard.

Nothing is imported from torch at module level, so that `set_environment` can come first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Role = Literal["target", "drafter", "verifier", "host"]

ENVIRONMENT: dict[str, str] = {
    "OMP_NUM_THREADS": "1",  # one value for all threads: torch.set_num_threads in a thread costs a recompile there
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "4",  # more workers than this only compete with the other roles' start
    # The static launcher holds the GIL while a launch queue is full, which stops every thread (2.11 to 2.14);
    # on 2.13.0 it can also call a kernel that was freed.
    "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0",
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
RECOMPILE_LIMIT = 64
"""Cache entries per code object before a compile is refused: devices x roles x grad modes, with room."""


class TorchUnfitError(RuntimeError):
    """This torch cannot run the trainer, or not the variant that was asked for; says why and what to do."""


class RecompileError(RuntimeError):
    """Something was compiled after the gate opened."""


def set_environment() -> None:
    """Set what must be set before torch is imported; values given from outside win."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def torch_version() -> tuple[int, int]:
    """(major, minor) of the torch in use."""
    import torch

    return parse_version(torch.__version__)


def parse_version(text: str) -> tuple[int, int]:
    """(major, minor) of a version such as `2.11.0+cu130`."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise TorchUnfitError(f"cannot read torch's version {text!r}")
    return int(match[1]), int(match[2])


def check_supported(version: tuple[int, int]) -> None:
    """Raises TorchUnfitError for a torch that is known not to work in threads."""
    if version < (2, 11):
        raise TorchUnfitError(
            f"torch {version[0]}.{version[1]} is too old: a backward cannot be compiled together with its forward in "
            "every thread; install torch 2.11, or 2.13 or newer"
        )
    if version == (2, 12):
        raise TorchUnfitError(
            "torch 2.12 is not supported: its autograd threads can free a Python context while another thread holds "
            "the interpreter lock and deadlock (pytorch issue 180701); install torch 2.11, or 2.13 or newer"
        )


def supports_compiler_graphs(version: tuple[int, int]) -> bool:
    """Whether compiler-managed CUDA graphs (reduce-overhead) work off the main thread: from 2.13."""
    return version >= (2, 13)


def check_compiler_graphs(version: tuple[int, int]) -> None:
    """Raises TorchUnfitError where `graphs = compiler` cannot work."""
    if not supports_compiler_graphs(version):
        raise TorchUnfitError(
            f"variant graphwarm needs torch 2.13 or newer, this is {version[0]}.{version[1]}: compiler-managed CUDA "
            "graphs keep their state in the importing thread there, and a drafter thread fails on its first step; "
            "use variant threadwarm, which captures its own graph on its own thread"
        )


def check_graphs(graphs: str, drafters: Iterable[str], version: tuple[int, int]) -> None:
    """Raises TorchUnfitError if the drafters' kind of CUDA graphs cannot work on this torch. On a CPU none is used."""
    if graphs == "compiler" and any(device != "cpu" for device in drafters):
        check_compiler_graphs(version)


def apply_torch_config() -> None:
    """Set torch's compiler configuration for the calling thread. Call it in main and first in every thread.

    Up to 2.11 the settings are the process's; from 2.12 each thread has its own copy, and one set in main does
    nothing anywhere else.
    """
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    version = torch_version()
    check_supported(version)
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = RECOMPILE_LIMIT
    dynamo.fail_on_recompile_limit_hit = True  # never quietly eager
    dynamo.suppress_errors = False
    dynamo.automatic_dynamic_shapes = False
    if version < (2, 14):
        # 2.11 to 2.13: another thread's FX trace sets a process-wide flag; without this a warm call then raises.
        dynamo.force_compile_during_fx_trace = True
    functorch: Any = torch._functorch.config
    # Compile a backward with its forward, on the thread and under the lock of the forward. Left lazy, it compiles on
    # the autograd thread that all drafters of one device share: two first steps at once then wait for each other.
    functorch.force_non_lazy_backward_lowering = True
    inductor: Any = torch._inductor.config
    inductor.triton.cudagraphs = False
    if version == (2, 13):
        inductor.use_static_cuda_launcher = False  # see ENVIRONMENT


def configure_process() -> None:
    """Process-wide numerics; main calls it once, before any thread starts or anything is compiled."""
    import torch

    apply_torch_config()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    if torch.cuda.is_available():
        poison_dense_flex()


@dataclass(frozen=True, slots=True)
class ThreadState:
    """What a thread owns."""

    device: torch.device
    stream: Any
    """Its CUDA stream, already current; None on CPU."""
    generator: torch.Generator
    """Its own random numbers: the default generators are rewound by compiles in other threads."""


@contextmanager
def thread_rules(role: Role, device: str | torch.device, seed: int = 0) -> Iterator[ThreadState]:
    """Enter a thread's life: configuration, device, stream, generator, autograd mode, in this order."""
    import torch

    apply_torch_config()
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    stream: Any = None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread starts on device 0
        # What main queued on the default stream (weights) is not ordered before work on our own stream.
        torch.cuda.synchronize(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.cuda.set_stream(stream)
    state = ThreadState(device, stream, generator)
    if role == "drafter":
        # Backward, its compile and its capture stay on this thread; the object acts from its construction on.
        with torch.autograd.set_multithreading_enabled(False):
            yield state
    elif role in ("target", "verifier"):
        with torch.no_grad():
            yield state
    else:
        yield state


@dataclass(frozen=True, slots=True)
class CompileCounts:
    """Process-wide totals since the start."""

    graphs: int
    """Graphs that Dynamo captured."""
    breaks: int
    """Distinct reasons of graph breaks."""
    backends: int
    """Graphs that Inductor compiled or took from its cache; a backward compiled late shows only here."""


_at_the_gate: CompileCounts | None = None


def compile_counts() -> CompileCounts:
    """What has been compiled so far, in all threads."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return CompileCounts(
        graphs=int(counters["stats"]["unique_graphs"]),
        breaks=len(counters["graph_break"]),
        backends=sum(int(inductor[f"fxgraph_cache_{kind}"]) for kind in ("hit", "miss", "bypass")),
    )


def forbid_compilation() -> None:
    """From now on any compile in any thread raises and names the guard that failed. Call it as the gate opens."""
    global _at_the_gate
    import torch

    _at_the_gate = compile_counts()
    torch.compiler.set_stance("fail_on_recompile")


def allow_compilation() -> None:
    """Undo `forbid_compilation`; only while every other thread is parked."""
    global _at_the_gate
    import torch

    _at_the_gate = None
    torch.compiler.set_stance("default")


def check_nothing_compiled(since: CompileCounts | None = None) -> None:
    """Raises RecompileError if anything was compiled after `since` (default: the gate; before it, never).

    The stance does not see everything: a backward that is compiled late is no Dynamo frame. The counters do.
    """
    since = since if since is not None else _at_the_gate
    if since is None:
        return
    now = compile_counts()
    if now != since:
        raise RecompileError(
            f"compiled after the gate opened: graphs {since.graphs} -> {now.graphs}, Inductor {since.backends} -> "
            f"{now.backends}, graph breaks {since.breaks} -> {now.breaks}; TORCH_LOGS=recompiles names the guard"
        )


def poison_dense_flex() -> None:
    """Make FlexAttention's dense fallback raise in this process, whichever way it is reached.

    Uncompiled, FlexAttention computes every score: at 49,152 context tokens that is hundreds of gigabytes. The kernel
    table of the two operators is private, the same in 2.11, 2.13 and 2.14.
    """
    from torch._C import DispatchKey
    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

    from trainer.model.attention import DenseFallbackError

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise DenseFallbackError("FlexAttention reached its dense kernel: the call was not compiled")

    for operator in (flex_attention, flex_attention_backward):
        operator.py_kernels[DispatchKey.CompositeExplicitAutograd] = refuse
        operator._dispatch_cache.clear()
