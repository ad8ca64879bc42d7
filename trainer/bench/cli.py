"""`python -m trainer bench drafter|target|pipeline|threads|peers --shape 27b|8b|tiny`: a line for each result.

Exit codes: 0 done; 1 what was asked cannot be measured here; 2 wrong arguments or settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import torch_setup

if TYPE_CHECKING:
    import torch


def positive(text: str) -> int:
    """A count on the command line. Raises ValueError, which argparse tells as a usage error."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line of `trainer bench`."""
    made = argparse.ArgumentParser(prog="trainer bench", description=(__doc__ or "").splitlines()[0])
    made.add_argument("part", choices=("drafter", "target", "pipeline", "threads", "peers"))
    made.add_argument(
        "--shape", choices=("27b", "8b", "tiny"), nargs="+", default=["tiny"], help="one, or several in one process"
    )
    made.add_argument("--documents", type=positive, nargs="+", default=[1, 4], help="documents in one packed row")
    made.add_argument("--threads", type=positive, nargs="+", default=[1, 4], help="drafter threads on one device")
    made.add_argument(
        "--graphs",
        choices=("none", "step"),
        nargs="+",
        default=["none", "step"],
        help="kinds of CUDA graphs (drafter, threads)",
    )
    made.add_argument("--targets", nargs="+", metavar="DEVICE", help="devices of the targets (pipeline)")
    made.add_argument("--drafters", nargs="+", metavar="DEVICE", help="devices of the drafters (pipeline)")
    made.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", dest="settings", help="settings of the run (pipeline)"
    )
    made.add_argument("--steps", type=positive, help="steps of each thread (threads, 100) or of the run (pipeline, 30)")
    made.add_argument("--repeats", type=positive, default=12, help="timed steps or forwards (drafter, target, peers)")
    made.add_argument("--tokens", type=positive, help="tokens of one row (target); default: 8192, tiny 1024")
    made.add_argument(
        "--packing",
        choices=("auto", "row", "documents"),
        default="auto",
        help="target.packing (target)",
    )
    made.add_argument("--peer-folder", type=Path, help="where the peer is, or is to be, installed (peers)")
    made.add_argument(
        "--peer-forms",
        choices=("whole", "flex"),
        nargs="+",
        default=["whole", "flex"],
        help="the peer with its whole draft model compiled, and as it comes (peers)",
    )
    made.add_argument(
        "--recompute", choices=("auto", "none", "elementwise"), default="auto", help="step.recompute (drafter, peers)"
    )
    made.add_argument("--recompute-mlps", type=int, default=0, help="step.recompute_mlps (drafter, peers)")
    made.add_argument("--fp8", action="store_true", help="also with step.fp8 (drafter, peers), target.fp8 (target)")
    made.add_argument("--compile", action="store_true", help="also with target.compile (target)")
    made.add_argument("--profile", action="store_true", help="add GPU time by kind of kernel (drafter, target)")
    made.add_argument("--json", action="store_true", help="JSON lines instead of text")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark, print each result when it is there. Returns the exit code."""
    arguments = parser().parse_args(argv)
    torch_setup.set_environment()
    import torch

    from trainer.bench.measure import BenchError, matmul_ceiling
    from trainer.config import ConfigError
    from trainer.foreseen import FORESEEN

    torch_setup.configure_process()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    ceiling = matmul_ceiling(device)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    head = {"card": card, "torch": torch.__version__, "ceiling_tflops": ceiling}
    _say(head, arguments.json)
    parts: dict[str, Callable[[argparse.Namespace, torch.device, float], Iterator[Any]]] = {
        "drafter": _drafter,
        "target": _target,
        "pipeline": _pipeline,
        "threads": _threads,
        "peers": _peers,
    }
    try:
        for shape in arguments.shape:
            one = argparse.Namespace(**{**vars(arguments), "shape": shape})
            for result in parts[arguments.part](one, device, ceiling):
                _say(dataclasses.asdict(result), arguments.json)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    except (BenchError, *FORESEEN) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _say(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
        return
    shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items() if value != {}}
    print("  ".join(f"{key} {value}" for key, value in shown.items()), flush=True)


def _require_gpu(arguments: argparse.Namespace, device: torch.device) -> None:
    """Raises BenchError where a drafter of a real shape would train on a CPU, for hours."""
    from trainer.bench.measure import BenchError

    if device.type == "cpu" and arguments.shape != "tiny":
        raise BenchError(
            f"bench {arguments.part} --shape {arguments.shape} needs a CUDA device: one step takes minutes on a CPU; "
            "use --shape tiny here"
        )


def _drafter(arguments: argparse.Namespace, device: torch.device, ceiling: float) -> Iterator[Any]:
    _require_gpu(arguments, device)
    kinds = arguments.graphs if device.type == "cuda" else ["none"]
    for documents, graphs in product(arguments.documents, kinds):
        yield from _our_step(arguments, documents, graphs, device, ceiling)


def _our_step(
    arguments: argparse.Namespace, documents: int, graphs: str, device: torch.device, ceiling: float
) -> Iterator[Any]:
    """Plain, and with --fp8 in 8 bits."""
    from trainer.bench.drafter import bench_drafter
    from trainer.config import StepConfig

    for fp8 in (False, True)[: 1 + arguments.fp8]:
        with torch_setup.thread_rules("drafter", device):
            yield bench_drafter(
                arguments.shape,
                documents,
                graphs=graphs,
                ceiling=ceiling,
                device=device,
                repeats=arguments.repeats,
                profile=arguments.profile,
                options=StepConfig(fp8=fp8, recompute=arguments.recompute, recompute_mlps=arguments.recompute_mlps),
            )


def _target(arguments: argparse.Namespace, device: torch.device, ceiling: float) -> Iterator[Any]:
    from trainer.bench.target import bench_target

    compiles, eights = (False, True)[: 1 + arguments.compile], (False, True)[: 1 + arguments.fp8]
    for documents, compile, fp8 in product(arguments.documents, compiles, eights):
        with torch_setup.thread_rules("target", device):
            yield bench_target(
                arguments.shape,
                documents,
                tokens=arguments.tokens,
                packing=arguments.packing,
                compile=compile,
                fp8=fp8,
                ceiling=ceiling,
                device=device,
                repeats=arguments.repeats,
                profile=arguments.profile,
            )


def _pipeline(arguments: argparse.Namespace, device: torch.device, ceiling: float) -> Iterator[Any]:
    from trainer.bench.pipeline import STEPS, bench_pipeline
    from trainer.config import ConfigError

    if bare := [setting for setting in arguments.settings if "=" not in setting]:
        raise ConfigError(f"--set takes KEY=VALUE, got {', '.join(bare)}")
    for documents in arguments.documents:
        yield bench_pipeline(
            arguments.shape,
            documents,
            targets=arguments.targets or [str(device)],
            drafters=arguments.drafters or [str(device)],
            steps=arguments.steps or STEPS,
            repeats=arguments.repeats,
            ceiling=ceiling,
            settings=dict(setting.partition("=")[::2] for setting in arguments.settings),
            tell=lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True),
        )


def _threads(arguments: argparse.Namespace, device: torch.device, ceiling: float) -> Iterator[Any]:
    """Each kind of graphs, and after both how they compare; without a GPU there are no graphs."""
    from trainer.bench.threads import STEPS, ThreadsRatio, bench_threads

    _require_gpu(arguments, device)
    kinds = arguments.graphs if device.type == "cuda" else ["none"]
    for threads in arguments.threads:
        done = {}
        for graphs in kinds:
            done[graphs] = bench_threads(arguments.shape, threads, graphs, device, steps=arguments.steps or STEPS)
            yield done[graphs]
        if {"none", "step"} <= done.keys():
            yield ThreadsRatio.of(done["none"], done["step"])


def _peers(arguments: argparse.Namespace, device: torch.device, ceiling: float) -> Iterator[Any]:
    """Ours, then the peer with its whole draft model compiled, then the peer as it comes."""
    from trainer.bench.peers import PeerUnavailable, bench_peer, install

    if device.type != "cuda":
        raise PeerUnavailable("the peer's FlexAttention step needs a CUDA device")
    install(arguments.peer_folder or Path(tempfile.gettempdir()) / "trainer-bench-peer")
    for documents in arguments.documents:
        yield from _our_step(arguments, documents, "step", device, ceiling)
        for form in arguments.peer_forms:
            yield bench_peer(
                arguments.shape,
                documents,
                whole=form == "whole",
                ceiling=ceiling,
                device=device,
                repeats=arguments.repeats,
            )


if __name__ == "__main__":
    raise SystemExit(main())
