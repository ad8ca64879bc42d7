"""Every benchmark of the trainer that this machine can run, and one table at the end.

    python -m benchmarks.table [--shape 27b 8b] [--part pipeline ...] [--documents 4]

Each runs as `python -m trainer bench PART --json` in a process of its own, so that none finds another one's memory in
use; a line on standard error says which. Without a GPU that is the tiny shape, whose times say only that it all works.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.topology import probe_hardware

PARTS = ("drafter", "target", "pipeline", "threads")
DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    part: str
    shape: str
    setting: str
    figure: str
    beside: str
    """The ceiling, bound or peer of the same run that the figure stands beside."""
    memory: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print. Returns 1 where a benchmark failed; the table says which."""
    parser = argparse.ArgumentParser(prog="benchmarks.table", description=__doc__.splitlines()[0] if __doc__ else None)
    gpus = probe_hardware().gpus
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument(
        "--shape", choices=("27b", "8b", "tiny"), nargs="+", default=["27b", "8b", "tiny"] if gpus else ["tiny"]
    )
    parser.add_argument("--documents", type=int, nargs="+", default=[4] if gpus else [1])
    arguments = parser.parse_args(argv)
    rows, heads, failed = [], [], False
    for part in arguments.part:
        for shape in arguments.shape:
            words = command(part, shape, arguments.documents, on_gpu=bool(gpus))
            if words is None:
                continue
            print(f"running trainer bench {' '.join(words)}", file=sys.stderr, flush=True)
            lines, error = run(words)
            heads += [line for line in lines if "card" in line]
            rows += [row_of(part, line) for line in lines if "card" not in line]
            if error is not None:
                failed = True
                rows.append(Row(part, shape, "", "failed", error))
    if heads:
        ceilings = [head["ceiling_tflops"] for head in heads]
        print(
            f"{heads[0]['card']}, torch {heads[0]['torch']}, matmul {min(ceilings):.3g} to {max(ceilings):.3g} TFLOP/s"
        )
    print("\n".join(table(rows)))
    return 1 if failed else 0


def command(part: str, shape: str, documents: Sequence[int], *, on_gpu: bool) -> list[str] | None:
    """The words after `trainer bench`; None where a part has nothing to say of a shape."""
    if part == "threads" and shape == "27b":
        return None  # four of these do not fit one card, and its launches hide behind its products
    quick = (
        [] if on_gpu else {"threads": ["--steps", "5"], "pipeline": ["--repeats", "3"]}.get(part, ["--repeats", "3"])
    )
    rows = [] if part == "threads" else ["--documents", *map(str, documents)]
    options = {"drafter": ["--fp8"], "target": ["--fp8", "--compile"]} if on_gpu and shape != "tiny" else {}
    more = options.get(part, [])
    return [part, "--shape", shape, *rows, *quick, *more, "--json"]


def run(words: Sequence[str]) -> tuple[list[dict[str, Any]], str | None]:
    """(the lines it printed, why it failed)."""
    process = [sys.executable, "-m", "trainer", "bench", *words]
    try:
        done = subprocess.run(process, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return [], f"not done after {DEADLINE_S / 60:.0f} minutes"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0:
        return lines, None
    said = done.stderr.strip().splitlines()
    return lines, said[-1] if said else f"exit code {done.returncode}"


def row_of(part: str, found: dict[str, Any]) -> Row:
    """A result as a line."""
    shape = found["shape"]
    if part == "drafter":
        return Row(
            part,
            shape,
            f"{_count(found['documents'], 'document')}, graphs {found['graphs']}" + (", fp8" if found["fp8"] else ""),
            f"{found['step_ms']:,.1f} ms a step",
            f"{found['of_ceiling']:.0%} of the ceiling",
            _memory(found["peak_gb"]),
        )
    if part == "target":
        return Row(
            part,
            shape,
            f"{_count(found['documents'], 'document')} in {found['tokens']:,} tokens, by {found['packing']}"
            + (", compiled" if found["compiled"] else "")
            + (", fp8" if found["fp8"] else ""),
            f"{found['tokens_per_s']:,.0f} tokens/s",
            f"{found['of_ceiling']:.0%} of the ceiling, {found['speedup']:.2f} x transformers' own forward",
            _memory(found["peak_gb"]),
        )
    if part == "pipeline":
        return Row(
            part,
            shape,
            f"{_count(found['documents'], 'document')}, {found['targets']} | {found['drafters']}",
            f"{found['pipeline_tokens_per_s']:,.0f} tokens/s",
            f"{found['of_bound']:.0%} of the bound ({found['bound']})"
            + (f"; {found['note']}" if found["note"] else ""),
            _memory(found["memory_gb"]),
        )
    if "speedup" in found:
        beside = f"{found['host_ratio']:.2f} x its CPU time"
        return Row(part, shape, _count(found["threads"], "thread"), f"replay {found['speedup']:.2f} x plain", beside)
    return Row(
        part,
        shape,
        f"{_count(found['threads'], 'thread')}, graphs {found['graphs']}",
        f"{found['steps_per_s']:.3g} steps/s",
        f"{found['host_ms']:.3g} ms CPU a step",
    )


def table(rows: Iterable[Row]) -> list[str]:
    """Aligned columns."""
    cells = [("part", "shape", "setting", "figure", "beside", "memory")]
    cells += [(row.part, row.shape, row.setting, row.figure, row.beside, row.memory) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _memory(gigabytes: float) -> str:
    return f"{gigabytes:.1f} GB" if gigabytes else ""


if __name__ == "__main__":
    raise SystemExit(main())
