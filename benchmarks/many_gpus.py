"""Several GPUs of one host in one run of a few minutes: facts, correctness, start-up, and how the pipeline scales.

    python -m benchmarks.many_gpus --out DIR [--budget-s 570] [--starts 5] [--parts facts,correctness,...]
    python -m benchmarks.many_gpus --out DIR --devices cpu,cpu --shape tiny     the same logic without a GPU

DIR gets results.json and table.txt, rewritten after every finding, logs/ of everything that was started, and smi/ with
the machine's answers, fit to become fixtures. Exit code 1 where a check is broken. Run it with `timeout`: what is there
by then is complete.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import facts
from benchmarks.parts import Part, Work, chosen, run_parts
from benchmarks.runs import check_memory, run_to_end
from benchmarks.setting import small_run, this_machine
from tests.trainer.gpu.names import ON_CPU, OVER_DEVICES

CASE_LIMIT_S = 150.0
START_LIMIT_S = 240.0
"""A start that takes longer has hung: cold ones took up to 117 s on one H200."""
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


def record_facts(work: Work, setting: Setting) -> None:
    """The machine's own words."""
    cards = facts.record(work, work.out / "smi")
    if setting.on_gpu:
        work.check(f"nvidia-smi sees the {len(setting.devices)} devices", cards >= len(setting.devices))


def correctness(work: Work, setting: Setting) -> None:
    """The cases over several devices, each in a process of its own; two at a time."""
    names = [*OVER_DEVICES, "a_hand_off_without_its_event_is_noticed"] if setting.on_gpu else ON_CPU
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
        futures = [pool.submit(one, name) for name in names]
    for future in futures:
        future.result()
    work.number("seconds of each case", seconds)


def starts(work: Work, setting: Setting) -> None:
    """`train` behind its gate: once from empty caches, then from warm ones; last with NCCL named."""
    settings = small_run(setting.on_gpu) | setting.topology() | {"run.max_steps": str(STEPS if setting.on_gpu else 24)}
    caches = work.out / "caches"
    rows: list[dict[str, Any]] = []
    plans = [(f"start-{i + 1}", "cold" if i == 0 else "warm", "auto") for i in range(setting.starts)]
    if setting.on_gpu and len(setting.devices) > 1:
        # Second, so that it is not the one that falls to a short budget.
        plans.insert(1, ("start-nccl", "warm", "nccl"))
    for name, caches_are, exchange in plans:
        work.require(25.0 if rows else 5.0, name)
        found = run_to_end(work, name, settings | {"run.exchange": exchange}, caches=caches, limit_s=START_LIMIT_S)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_gpus", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--budget-s", type=float, default=570.0, help="seconds in all")
    parser.add_argument("--devices", default="", help="as cuda:0,cuda:1 or cpu,cpu; default: every GPU")
    parser.add_argument("--shape", choices=("27b", "8b", "tiny"), default="27b", help="of the stages and the pipeline")
    parser.add_argument("--starts", type=int, default=5, help="starts of `train`, the first with empty caches")
    parser.add_argument("--parts", default="", help="only these, comma-separated")
    options = parser.parse_args(argv)
    machine = this_machine()
    devices = tuple(options.devices.split(",")) if options.devices else machine.devices
    if len(devices) < 2:
        raise SystemExit(f"it takes two devices or more, here are {', '.join(devices)}; give --devices, as cpu,cpu")
    setting = Setting(devices, options.shape, options.starts)
    parts = [
        Part("facts", 0.03, 5.0, lambda work: record_facts(work, setting)),
        Part("correctness", 0.22, 20.0, lambda work: correctness(work, setting)),
        Part("starts", 0.35, 20.0, lambda work: starts(work, setting)),
    ]
    head = {**machine.head(), "devices": ",".join(devices), "shape": options.shape, "budget_s": options.budget_s}
    return run_parts(chosen(parts, options.parts), options.out, options.budget_s, head)


if __name__ == "__main__":
    raise SystemExit(main())
