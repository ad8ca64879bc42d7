"""Several GPUs of one host in one run of a few minutes: facts, correctness, start-up, and how the pipeline scales.

    python -m benchmarks.many_gpus --out DIR [--budget-s 570] [--starts 5] [--parts facts,correctness,...]
    python -m benchmarks.many_gpus --out DIR --devices cpu,cpu --shape tiny     the same logic without a GPU

DIR gets results.json and table.txt, rewritten after every finding, logs/ of everything that was started, and smi/ with
the machine's answers, fit to become fixtures. Exit code 1 where a check is broken. Run it with `timeout`: what is there
by then is complete.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks import facts
from benchmarks.parts import OutOfTime, Part, Work, budget, chosen, folder, run_parts
from benchmarks.runs import check_memory, run_to_end
from benchmarks.setting import START_LIMIT_S, devices_here, small_run, this_machine
from tests.trainer.gpu.names import ON_CPU, OVER_DEVICES
from trainer.bench.cli import positive

CASE_LIMIT_S = 150.0
STEPS = 60
"""Optimizer steps of each measured start; memory is compared over the last two thirds of them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the command line asked for."""

    devices: tuple[str, ...]
    shape: str
    starts: int

    @property
    def on_gpu(self) -> bool:
        return self.devices[0] != "cpu"

    def topology(self) -> dict[str, str]:
        """Every device drafts, so that all of them meet in the exchange; targets on the first half, a verifier last."""
        half = self.devices[: max(1, len(self.devices) // 2)]
        return {
            "topology.target": ",".join(half),
            "topology.drafter": ",".join(self.devices),
            "topology.verifier": self.devices[-1],
        }

    def apart(self) -> dict[str, str]:
        """Drafters by themselves on the second half, as NCCL wants it; empty where devices are too few."""
        if len(self.devices) < 3 or not self.on_gpu:
            return {}
        half = len(self.devices) // 2
        return {
            "topology.target": ",".join(self.devices[:half]),
            "topology.drafter": ",".join(self.devices[half:]),
            "topology.verifier": self.devices[0],
        }


def record_facts(work: Work, setting: Setting) -> None:
    """The machine's own words."""
    cards = facts.record(work, work.out / "smi")
    if setting.on_gpu:
        work.check(f"nvidia-smi sees the {len(setting.devices)} devices", cards >= len(setting.devices))


def correctness(work: Work, setting: Setting) -> None:
    """The cases over several devices, each in a process of its own; two at a time, those with NCCL alone."""
    names = [*OVER_DEVICES, "a_hand_off_without_its_event_is_noticed"] if setting.on_gpu else ON_CPU
    by_nccl = [name for name in names if "nccl" in name]
    seconds: dict[str, float] = {}

    def one(name: str) -> None:
        work.require(20.0, name)
        done = work.call(
            [sys.executable, "-m", "tests.trainer.gpu.cases", name, ",".join(setting.devices)], limit_s=CASE_LIMIT_S
        )
        seconds[name] = round(done.seconds, 1)
        if not work.check(name, done.code == 0 and done.text.rstrip().endswith("ok")):
            work.note(f"{name}: {'no end in time' if done.code is None else f'exit {done.code}'}\n{done.text[-1500:]}")

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(one, name) for name in names if name not in by_nccl]
    for future in futures:
        future.result()
    # Kernels of two processes that each wait for the other device's would take turns on the cards.
    for name in by_nccl:
        one(name)
    work.number("seconds of each case", seconds)


def starts(work: Work, setting: Setting) -> None:
    """`train` behind its gate: once from empty caches, then from warm ones; one with NCCL named, if it can be."""
    settings = small_run(setting.on_gpu) | setting.topology() | {"run.max_steps": str(STEPS if setting.on_gpu else 24)}
    caches = work.out / "caches"
    rows: list[dict[str, Any]] = []
    plans = [(f"start-{i + 1}", "cold" if i == 0 else "warm", "auto") for i in range(setting.starts)]
    if apart := setting.apart():
        # Second, so that it is not the one that falls to a short budget.
        plans.insert(1, ("start-nccl", "warm", "nccl"))
    for name, caches_are, exchange in plans:
        work.require(25.0 if rows else 5.0, name)
        placed = apart if exchange == "nccl" else {}
        found = run_to_end(
            work, name, settings | placed | {"run.exchange": exchange}, caches=caches, limit_s=START_LIMIT_S
        )
        rows.append({"start": name, "caches": caches_are, "exchange": exchange, **found.row()})
        work.number("starts", rows)
        work.check(f"{name}: {caches_are}, exit 0, nothing hung, nothing compiled after the gate", found.clean)
        check_memory(work, found.steps, name)
    cold = rows[0]["gate_s"]
    warm = [row["gate_s"] for row in rows[1:] if row["gate_s"] is not None]
    if cold and warm:
        work.number("warm over cold", max(warm) / cold)
        if setting.on_gpu:
            work.check("warm starts take at most 0.4 of the cold one", max(warm) <= 0.4 * cold)


@dataclass(frozen=True, slots=True)
class Split:
    """How many of the devices each role gets."""

    targets: int
    drafters: int
    verifiers: int = 0

    def __str__(self) -> str:
        return "+".join(str(n) for n in (self.targets, self.drafters, self.verifiers) if n)


SPLITS = {
    2: (Split(1, 1),),
    4: (Split(2, 2), Split(3, 1)),
    8: (Split(4, 3, 1), Split(5, 3), Split(2, 3, 3)),
}


def splits(count: int) -> tuple[Split, ...]:
    """The ones worth a measurement, the most telling first."""
    drafters = max(1, count // 3)
    return SPLITS.get(count, (Split(count - drafters, drafters),))


def pipeline(work: Work, setting: Setting) -> None:
    """Context tokens a second of the gated pipeline, for each split, against its slower stage alone."""
    rows: list[dict[str, Any]] = []
    needed = 120.0 if setting.on_gpu else 20.0
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(work.out / "caches" / "inductor"),
        "TRITON_CACHE_DIR": str(work.out / "caches" / "triton"),
    }
    for split in splits(len(setting.devices)):
        work.require(needed, f"split {split}")
        targets = setting.devices[: split.targets]
        drafters = setting.devices[split.targets : split.targets + split.drafters]
        # On a CPU the logic is what is tried.
        size = ["--documents", "4", "--steps", "30"] if setting.on_gpu else ["--documents", "1", "--steps", "6"]
        words = ["--shape", setting.shape, *size, "--repeats", "4", "--json"]
        words += ["--targets", *targets, "--drafters", *drafters]
        done = work.call(
            [sys.executable, "-m", "trainer", "bench", "pipeline", *words],
            environment=caches,
        )
        found = [json.loads(line) for line in done.text.splitlines() if line.startswith("{")]
        result = next((row for row in found if "pipeline_tokens_per_s" in row), None)
        if result is None:
            if done.code is None and work.left() <= 1.0:
                work.note(f"split {split}, as far as it came:\n{done.text[-600:]}")
                raise OutOfTime(f"split {split} was not done when the time was over")
            work.check(f"split {split}: measured", False)
            work.note(f"split {split}: exit {done.code}\n{done.text[-2000:]}")
            continue
        keys = ("target_tokens_per_s", "drafter_tokens_per_s", "bound_tokens_per_s", "pipeline_tokens_per_s")
        rows.append(
            {"split": str(split)}
            | {key.replace("_tokens_per_s", ""): round(result[key]) for key in keys}
            | {key: result[key] for key in ("of_bound", "recompiles", "memory_gb", "memory_growth_gb")}
            | {"seconds": round(done.seconds)}
        )
        work.number("context tokens/s", rows)
        work.check(f"split {split}: nothing compiled after the gate", result["recompiles"] == 0)
        if setting.on_gpu:
            work.check(f"split {split}: at least 95 % of the slower stage", result["of_bound"] >= 0.95)
            work.check(f"split {split}: memory flat", result["memory_growth_gb"] == 0)
        needed = max(needed, done.seconds) if setting.on_gpu else needed
    if any(split.verifiers for split in splits(len(setting.devices))):
        work.note("nothing is evaluated while a rate is taken: the cards of verifiers are idle")
    if setting.on_gpu and setting.shape == "27b" and len(setting.devices) == 8:
        work.check("at least 40,000 context tokens/s on 8 GPUs", max(row["pipeline"] for row in rows) >= 40_000)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_gpus", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=folder, required=True, help="a folder for the results")
    parser.add_argument("--budget-s", type=budget, default=570.0, help="seconds in all")
    parser.add_argument("--devices", type=devices_here, help="as cuda:0,cuda:1 or cpu,cpu; default: every GPU")
    parser.add_argument("--shape", choices=("27b", "8b", "tiny"), default="27b", help="of the stages and the pipeline")
    parser.add_argument("--starts", type=positive, default=5, help="starts of `train`, the first with empty caches")
    parser.add_argument("--parts", default="", help="only these, comma-separated")
    options = parser.parse_args(argv)
    machine = this_machine()
    devices = options.devices or machine.devices
    if len(devices) < 2:
        raise SystemExit(f"it takes two devices or more, here are {', '.join(devices)}; give --devices, as cpu,cpu")
    setting = Setting(devices, options.shape, options.starts)
    parts = [
        Part("facts", 15, 5.0, lambda work: record_facts(work, setting)),
        Part("correctness", 125, 20.0, lambda work: correctness(work, setting)),
        Part("starts", 230, 20.0, lambda work: starts(work, setting)),
        Part("pipeline", 200, 20.0, lambda work: pipeline(work, setting)),
    ]
    head = {**machine.head(), "devices": ",".join(devices), "shape": options.shape, "budget_s": options.budget_s}
    return run_parts(chosen(parts, options.parts), options.out, options.budget_s, head)


if __name__ == "__main__":
    raise SystemExit(main())
