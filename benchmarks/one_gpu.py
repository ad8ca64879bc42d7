"""One GPU, part by part: a thousand steps, parity, stops, replay against plain launches, `fab`, cases, cold starts.

    python -m benchmarks.one_gpu --out DIR [--budget-s 570] [--parts thousand,parity,...] [--starts 20 --at-once 10]
    python -m benchmarks.one_gpu --out DIR --device cpu      the same logic without a GPU, smaller

DIR gets results.json and table.txt, rewritten after every finding, logs/ of everything that was started and runs/. Exit
code 1 where a check is broken. All parts together take about 45 minutes, most of them the cold starts; ten minutes hold
a few: name them with --parts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.parts import ROOT, Part, Work, budget, chosen, folder, run_parts
from benchmarks.runs import Event, TrainRun, check_memory, outcome, run_to_end
from benchmarks.setting import START_LIMIT_S, device_here, small_run, this_machine
from tests.trainer.gpu.names import ON_CPU, ON_ONE_DEVICE
from trainer.bench.cli import positive

STOP_LIMIT_S = 30.0
CASE_LIMIT_S = 240.0
LOSS_PARITY = 0.01
"""Most that the losses may differ on average, relatively: 0.00025 was measured, 0.004 at single steps."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the command line asked for."""

    device: str
    steps: int
    parity_steps: int
    starts: int
    at_once: int = 1
    """Cold starts side by side, in turn on every GPU here."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def run(self, **more: str) -> dict[str, str]:
        """One target, two drafters and a verifier, all on the device."""
        roles = {"topology.target": 1, "topology.drafter": 2, "topology.verifier": 1}
        topology = {role: ",".join([self.device] * count) for role, count in roles.items()}
        return small_run(self.on_gpu) | topology | {key.replace("__", "."): value for key, value in more.items()}


def thousand(work: Work, setting: Setting) -> None:
    """The run itself, long enough for whatever grows or recompiles to show; evaluations and checkpoints on the way."""
    every = max(1, setting.steps // 4)
    settings = setting.run(
        run__max_steps=str(setting.steps), run__eval_every=str(every), run__checkpoint_every=str(every),
        run__decode_prompts="2", run__decode_tokens="8",
    )  # fmt: skip
    found = run_to_end(work, "thousand", settings, caches=work.out / "caches")
    work.check(f"{setting.steps} steps, exit 0, nothing compiled after the gate", found.clean)
    check_memory(work, found.steps, "run")
    work.number("start", found.row())
    if found.steps:
        # The first logged steps still fill the queues.
        late = [row["context_tokens_per_s"] for row in found.steps[len(found.steps) // 2 :]]
        work.number("context tokens/s, mean of the second half", mean(late))
        work.number("loss, first and last", [found.steps[0]["loss"], found.steps[-1]["loss"]])


def parity(work: Work, setting: Setting) -> None:
    """The compiled, captured step against the uncompiled reference: same seeds, same data, step by step."""
    found = {}
    for variant in ("threadwarm", "sdpa"):
        work.require(20.0, variant)
        settings = setting.run(run__max_steps=str(setting.parity_steps))
        found[variant] = run_to_end(work, f"parity-{variant}", settings, caches=work.out / "caches", variant=variant)
        work.check(f"{variant}: {setting.parity_steps} steps, exit 0", found[variant].clean)
    mine, reference = (found[variant].steps for variant in ("threadwarm", "sdpa"))
    pairs = list(zip(mine, reference, strict=False))
    if not work.check("both logged every step", len(mine) == len(reference) == setting.parity_steps):
        return
    losses = [abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs]
    accepted = [abs(a["accept_len"] - b["accept_len"]) for a, b in pairs]
    work.number("relative difference of the loss, mean and most", [mean(losses), max(losses)])
    work.number("difference of the acceptance length, mean and most", [mean(accepted), max(accepted)])
    work.check(f"the loss differs by at most {LOSS_PARITY:.0%} on average", mean(losses) <= LOSS_PARITY)


def _seen(kind: str, enough: Callable[[Event], bool] = lambda row: True) -> Callable[[list[Event]], Event | None]:
    return lambda rows: next((row for row in rows if row["event"] == kind and enough(row)), None)


MOMENTS: dict[str, Callable[[list[Event]], Event | None]] = {
    "warm-up": _seen("start"),
    "capture": _seen("capture"),
    "steady state": _seen("step", lambda row: row["step"] >= 5),
}
"""When TERM is sent: as soon as the run's events give an answer."""


def stops(work: Work, setting: Setting) -> None:
    """TERM at three moments: the end within 30 s, a checkpoint where there was one to save, nobody left behind."""
    rows = []
    for moment, arrived in MOMENTS.items():
        if moment == "capture" and not setting.on_gpu:
            work.note("capture: there is none without a GPU")
            continue
        work.require(20.0, moment)
        settings = setting.run(run__max_steps="100000")
        # Empty caches for the first: compile workers are then at work.
        caches = work.out / ("caches-stop" if moment == "warm-up" else "caches")
        with TrainRun(work, f"stop-{moment.replace(' ', '-')}", settings, caches=caches) as run:
            met = run.wait_for(arrived, min(work.left() - STOP_LIMIT_S, START_LIMIT_S))
            if not work.check(f"{moment}: was reached", met is not None):
                work.note(f"{moment}:\n{run.tail()}")
                continue
            if moment == "warm-up":
                _await_workers(run, 90.0 if setting.on_gpu else 0.5)
            os.kill(run.child.pid, signal.SIGTERM)
            asked = time.monotonic()
            code = run.wait(STOP_LIMIT_S)
            seconds = time.monotonic() - asked
            # The kernel has them end with their parent or within moments of it.
            deadline = time.monotonic() + 5.0
            while (orphans := run.orphans()) and time.monotonic() < deadline:
                time.sleep(0.2)
            found = outcome(run, code)
            saved = sorted(path.name for path in (run.directory / "checkpoints").glob("step-*"))
            rows.append({"moment": moment, "exit": code, "seconds": round(seconds, 2), "saved": " ".join(saved)})
            work.number("stops", rows)
            work.check(f"{moment}: exit 0 within {STOP_LIMIT_S:.0f} s", code == 0)
            work.check(f"{moment}: no process left", not orphans)
            trained = bool(found.steps)
            work.check(f"{moment}: a checkpoint where something was trained", bool(saved) == trained)
            if moment == "capture":
                inside = not any(row["thread"] == "drafter0" for row in run.events("warmup"))
                work.check("capture: TERM came before the end of that warm-up", inside)


def _await_workers(run: TrainRun, limit_s: float) -> None:
    """Until compile workers have been at work for a while; on a CPU there are none, and the gate may open meanwhile."""
    deadline = time.monotonic() + limit_s
    while not run.orphans() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(min(5.0, limit_s))


def replay(work: Work, setting: Setting) -> None:
    """Graph replay against plain launches of the same compiled step: wall time, process time, launches."""
    steps = "200" if setting.on_gpu else "5"
    words = ["--shape", "tiny", "--threads", "1", "2", "--steps", steps, "--json"]
    done = work.call([sys.executable, "-m", "trainer", "bench", "threads", *words])
    rows = [json.loads(line) for line in done.text.splitlines() if line.startswith("{")]
    work.number("bench threads", [row for row in rows if "threads" in row])
    if not work.check("bench threads ended", done.code == 0):
        work.note(done.text[-1500:])


def operator(work: Work, setting: Setting) -> None:
    """`fab deploy launch` on this machine: real gate, real tmux where it is; training steps, then `fab stop`."""
    root = work.out / "operator"
    root.mkdir(parents=True)
    hosts = root / "hosts.yaml"
    hosts.write_text(
        f"default: here\ntargets:\n  here:\n    via: local\n    python: {sys.executable}\n"
        f"    root: {(root / 'root').resolve()}\n    workspace: {(root / 'workspace').resolve()}\n"
        # A run inherits nothing; packages that lie outside of this Python have to be named.
        f"    env: {{PYTHONPATH: {json.dumps(os.environ.get('PYTHONPATH', ''))}}}\n"
    )
    environment = {
        "DFLASH_HOSTS_FILE": str(hosts.resolve()),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }

    def fab(*words: str, limit_s: float) -> Any:
        done = work.call([sys.executable, "-m", "dflash_ops", *words], limit_s=limit_s, environment=environment)
        if done.code != 0:
            work.note(f"fab {' '.join(words)}: exit {done.code}\n{done.text[-2000:]}")
        return done

    sets = [word for key, value in setting.run(run__max_steps="100000").items() for word in ("--set", f"{key}={value}")]
    launched = fab("deploy", "launch", "--variant", "threadwarm", *sets, limit_s=180.0)
    if not work.check("fab deploy launch --variant threadwarm: exit 0", launched.code == 0):
        return
    try:
        work.number("seconds of deploy and launch", launched.seconds)
        step = _await_step(root / "workspace" / "runs", min(work.left() - 45.0, START_LIMIT_S))
        work.check("training steps were logged", step is not None)
        if step is not None:
            work.number("seconds from the trainer's start to its first step", step["time"] - step["began"])
    finally:
        stopped = fab("stop", limit_s=60.0)
    work.check("fab stop: exit 0, run stopped in order", stopped.code == 0 and "stopped on request" in stopped.text)
    work.note(stopped.text.strip()[-300:])


def _await_step(runs: Path, limit_s: float) -> Event | None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for path in runs.glob("*/metrics.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            for row in rows:
                if row["event"] == "step":
                    return dict(row) | {"began": rows[0]["time"]}
        time.sleep(0.2)
    return None


def cases(work: Work, setting: Setting) -> None:
    """The GPU test cases, each in a process of its own, four at a time; the hang without a gate last and alone."""
    names = ON_ONE_DEVICE if setting.on_gpu else ON_CPU
    seconds: dict[str, float] = {}

    def one(name: str) -> None:
        work.require(15.0, name)
        device = setting.device if setting.on_gpu else "cpu,cpu"
        done = work.call([sys.executable, "-m", "tests.trainer.gpu.cases", name, device], limit_s=CASE_LIMIT_S)
        seconds[name] = round(done.seconds, 1)
        if not work.check(name, done.code == 0 and done.text.rstrip().endswith("ok")):
            work.note(f"{name}: {'no end in time' if done.code is None else f'exit {done.code}'}\n{done.text[-1500:]}")

    with ThreadPoolExecutor(4 if setting.on_gpu else 1) as pool:
        futures = [pool.submit(one, name) for name in names]
    for future in futures:
        future.result()
    work.number("seconds of each case", seconds)
    if setting.on_gpu:
        work.require(160.0, "the hang without a gate")
        done = work.call(
            [sys.executable, "-m", "pytest", "-q", "tests/trainer/gpu/test_gpu.py", "-k", "hang_without_a_gate"]
        )
        work.check("four first calls at once hang without a gate", done.code == 0)


def cold(work: Work, setting: Setting) -> None:
    """Starts from empty caches, each with folders of its own; every fifth is started again from what it left.

    Several at once load each other: they show that none hangs, not how long a start takes.
    """
    rows: list[dict[str, Any]] = []
    devices = this_machine().devices if setting.on_gpu and setting.at_once > 1 else (setting.device,)
    longest = 10.0

    def start(index: int) -> None:
        nonlocal longest
        work.require(1.2 * longest, f"cold start {index + 1} of {setting.starts}")
        settings = replace(setting, device=devices[index % len(devices)]).run(run__max_steps="3")
        for kind in ("cold", "warm") if index % 5 == 0 else ("cold",):
            name = f"{kind}-{index + 1}"
            found = run_to_end(
                work, name, settings, caches=work.out / "caches-cold" / str(index), limit_s=START_LIMIT_S
            )
            rows.append({"start": name, **found.row()})
            work.number("starts", sorted(rows, key=lambda row: str(row["start"])))
            work.check(f"{name}: exit 0, not hung", found.clean)
            if kind == "cold":
                longest = max(longest, found.gate_s or START_LIMIT_S)

    with ThreadPoolExecutor(setting.at_once) as pool:
        futures = [pool.submit(start, index) for index in range(setting.starts)]
    late = [error for future in futures if (error := future.exception()) is not None]
    times = {
        kind: [row["gate_s"] for row in rows if row["start"].startswith(kind) and row["gate_s"] is not None]
        for kind in ("cold", "warm")
    }
    work.number("starts made", {kind: len(values) for kind, values in times.items()})
    work.number("seconds to the open gate, least and most", {k: [min(v), max(v)] for k, v in times.items() if v})
    if times["cold"] and times["warm"]:
        work.number("warm over cold, means", mean(times["warm"]) / mean(times["cold"]))
    if late:
        raise late[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=folder, required=True, help="a folder for the results")
    parser.add_argument("--budget-s", type=budget, default=570.0, help="seconds in all")
    parser.add_argument("--device", type=device_here, help="cuda:0 where there is one, else cpu")
    parser.add_argument("--steps", type=positive, default=1000, help="of the long run")
    parser.add_argument("--parity-steps", type=positive, default=200)
    parser.add_argument("--starts", type=positive, default=20, help="cold starts")
    parser.add_argument("--at-once", type=positive, default=1, help="cold starts side by side, over all GPUs")
    parser.add_argument("--parts", default="", help="only these, comma-separated")
    options = parser.parse_args(argv)
    machine = this_machine()
    setting = Setting(
        options.device or machine.devices[0], options.steps, options.parity_steps, options.starts, options.at_once
    )
    parts = [
        Part("thousand", 200, 60.0, lambda work: thousand(work, setting)),
        Part("parity", 120, 40.0, lambda work: parity(work, setting)),
        Part("stops", 150, 30.0, lambda work: stops(work, setting)),
        Part("replay", 70, 10.0, lambda work: replay(work, setting)),
        Part("operator", 150, 60.0, lambda work: operator(work, setting)),
        Part("cases", 400, 30.0, lambda work: cases(work, setting)),
        Part("cold", 2400, 20.0, lambda work: cold(work, setting)),
    ]
    head = {**machine.head(), "device": setting.device, "budget_s": options.budget_s}
    return run_parts(chosen(parts, options.parts), options.out, options.budget_s, head)


if __name__ == "__main__":
    raise SystemExit(main())
