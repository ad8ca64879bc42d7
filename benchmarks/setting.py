"""The machine at hand, and the small run that start-up and stops are measured with."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache

from benchmarks.parts import ROOT
from trainer.launch import versions

START_LIMIT_S = 240.0
"""A start that takes longer has hung: cold ones took up to 195 s on an H200, beside others."""
SMALL = {
    "run.tensorboard": "false",
    "run.log_every": "1",
    "run.eval_every": "100000",
    "run.checkpoint_every": "100000",
    "run.decode_prompts": "0",
    "run.gate_deadline_s": "200",
    "target.allow_slow_kernels": "true",
}
"""The shipped target and drafter, every step logged, nothing evaluated on the way, whichever kernels are installed."""
SMALLER = {
    "data.token_budget": "192",
    "data.block_slots": "12",
    "data.max_documents": "4",
    "data.max_document_tokens": "96",
    "data.heldout_documents": "2",
    "drafter.num_layers": "1",
    "drafter.sliding_layers": "0",
    "drafter.intermediate_size": "64",
}
"""On a CPU the logic is what is tried, not the speed. The runs of tests/trainer begin with these too."""


def small_run(on_gpu: bool) -> dict[str, str]:
    """Overrides for the command line."""
    return SMALL if on_gpu else SMALL | SMALLER


@dataclass(frozen=True, slots=True)
class Machine:
    """What stands at the head of the results."""

    devices: tuple[str, ...]
    names: tuple[str, ...]

    def head(self) -> dict[str, str]:
        """Card, versions, date."""
        kinds = dict.fromkeys(self.names)
        cards = ", ".join(f"{self.names.count(name)} x {name}" for name in kinds) or "no GPU"
        packages = ", ".join(f"{name} {version}" for name, version in versions().items())
        return {
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "cards": cards,
            "versions": packages,
            "machine": platform.machine(),
        }


@cache
def this_machine() -> Machine:
    """The GPUs here; without one, one CPU.

    Asked in a process of its own: one that has asked CUDA holds the cards open, and `fab launch` refuses held cards.
    """
    ask = "import json; from trainer.topology import probe_hardware; print(json.dumps(probe_hardware().gpus))"
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    names = tuple(json.loads(done.stdout.splitlines()[-1]))
    return Machine(tuple(f"cuda:{i}" for i in range(len(names))) or ("cpu",), names)


def devices_here(text: str) -> tuple[str, ...]:
    """Devices on the command line, separated by commas. What it raises argparse tells as a usage error."""
    names = tuple(part.strip() for part in text.split(","))
    here = {*this_machine().devices, "cpu"}
    if missing := [name for name in names if name not in here]:
        raise argparse.ArgumentTypeError(
            f"{', '.join(missing)}: no such device here; there are {', '.join(sorted(here))}"
        )
    return names


def device_here(text: str) -> str:
    """One of them."""
    names = devices_here(text)
    if len(names) != 1:
        raise argparse.ArgumentTypeError(f"takes one device, got {text}")
    return names[0]
