"""`python -m trainer bench drafter|threads|peers --shape 27b|8b|tiny --json`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from trainer import torch_setup


def parser() -> argparse.ArgumentParser:
    """The command line of `trainer bench`."""
    made = argparse.ArgumentParser(prog="trainer bench", description=__doc__)
    made.add_argument("part", choices=("drafter",))
    made.add_argument("--shape", choices=("27b", "8b", "tiny"), default="tiny")
    made.add_argument("--documents", type=int, nargs="+", default=[1, 4], help="documents in one packed row")
    made.add_argument("--profile", action="store_true", help="add GPU time by kind of kernel")
    made.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark and print it. Returns the exit code."""
    arguments = parser().parse_args(argv)
    torch_setup.set_environment()
    import torch

    from trainer.bench import drafter
    from trainer.bench.measure import matmul_ceiling
    from trainer.bench.shapes import SHAPES

    torch_setup.configure_process()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    ceiling = matmul_ceiling(device)
    results = drafter.run(arguments.shape, arguments.documents, device, ceiling, profile=arguments.profile)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    report: dict[str, Any] = {
        "card": card,
        "torch": torch.__version__,
        "ceiling_tflops": round(ceiling, 1),
        "results": results,
    }
    if arguments.json:
        print(json.dumps(report))
        return 0
    print(f"{card}, torch {torch.__version__}, matmul ceiling {ceiling:.0f} TFLOP/s")
    for row in results:
        print(
            f"{row['shape']} {drafter.describe(SHAPES[row['shape']], row['documents'])}; graphs {row['graphs']}: "
            f"{row['step_ms']:.1f} ms a step (+-{row['spread_ms'] / 2:.1f}), {row['sequences_per_s']:.2f} sequences/s, "
            f"{row['tflops']:.0f} TFLOP/s = {row['of_ceiling']:.0%} of the ceiling, peak {row['peak_gb']:.1f} GB"
        )
        if row["parts"]:
            print("   ", ", ".join(f"{kind} {value:g}" for kind, value in row["parts"].items()))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
