"""The trainer's command line.

    python -m trainer train    --variant V --run-dir DIR [--set key=value ...] [--resume auto|DIR] [--release ID]
    python -m trainer variants [--json]
    python -m trainer config   --variant V [--set key=value ...]
    python -m trainer eval     --checkpoint DIR [--json]
    python -m trainer export   --checkpoint DIR --format zlab|speculators --out DIR [--json]
    python -m trainer bench    PART [...]

Exit codes: 0 done, or stopped on request; 1 error, a directory that is no checkpoint among them; 2 wrong arguments or
configuration; 70 a warm-up ran past run.gate_deadline_s (all stacks are in the log). TERM, HUP and INT stop in order;
asked again two seconds later or more, the process ends at once with 1.

torch is imported inside the commands: some of it reads the environment once, at its import.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from trainer import torch_setup
from trainer.config import ConfigError, to_dict
from trainer.signals import leave_when_asked
from trainer.topology import probe_hardware
from trainer.variants import DEFAULT_VARIANT, VARIANTS, config_for

EXIT_USAGE = 2

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""A run never waits for a hub: what it needs lies on this machine. Set to 0 outside to allow it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run one command, return the exit code."""
    began = time.monotonic()
    words = list(sys.argv[1:] if argv is None else argv)
    torch_setup.set_environment()
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    if words[:1] == ["bench"]:  # it has its own arguments
        from trainer.bench.cli import main as bench

        return bench(words[1:])
    args = _parser().parse_args(words)
    try:
        if args.command == "train":
            leave_when_asked()
            from trainer.launch import train

            return train(
                config_for(args.variant, _assignments(args), probe_hardware()),
                run_dir=args.run_dir,
                release=args.release,
                process_began=began,
            )
        if args.command == "variants":
            return _variants(args.json)
        if args.command == "config":
            config = config_for(args.variant, _assignments(args), probe_hardware())
            print(json.dumps(to_dict(config), indent=2))
            return 0
        if args.command == "export":
            from trainer.stored import export_checkpoint

            return export_checkpoint(args.checkpoint, form=args.format, out=args.out, as_json=args.json)
        from trainer.stored import evaluate_checkpoint

        return evaluate_checkpoint(args.checkpoint, as_json=args.json)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainer", description="Train DFlash drafters; threads in one process.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a drafter")
    _add_config_arguments(train)
    train.add_argument("--run-dir", required=True, help="where metrics.jsonl and checkpoints/ go")
    train.add_argument("--resume", metavar="auto|DIR", help="go on from a checkpoint; auto: newest intact of run-dir")
    train.add_argument("--release", default="source", help="name of the shipped release, for the log")

    variants = commands.add_parser("variants", help="list the variants")
    variants.add_argument("--json", action="store_true")

    config = commands.add_parser("config", help="print a variant's whole configuration as JSON")
    _add_config_arguments(config)

    evaluate = commands.add_parser("eval", help="acceptance length of a checkpoint on held-out documents")
    evaluate.add_argument("--checkpoint", required=True, metavar="DIR")
    evaluate.add_argument("--json", action="store_true")

    export = commands.add_parser("export", help="write a checkpoint's drafter in a published form")
    export.add_argument("--checkpoint", required=True, metavar="DIR")
    export.add_argument("--format", choices=("zlab", "speculators"), default="zlab")
    export.add_argument("--out", required=True, metavar="DIR", help="a directory that does not exist yet")
    export.add_argument("--json", action="store_true")

    commands.add_parser("bench", help="measure one part; see `trainer bench --help`", add_help=False)
    return parser


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    # No `choices`: our own message lists the variants and names the nearest.
    parser.add_argument("--variant", default=DEFAULT_VARIANT, help=f"one of {', '.join(VARIANTS)}")
    parser.add_argument(
        "--set", action="append", default=[], metavar="key=value", dest="assignments", help="override one setting"
    )


def _assignments(args: argparse.Namespace) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in args.assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes key=value, got {text!r}")
        if key == "variant":
            raise ConfigError("choose the variant with --variant, not with --set")
        found[key.strip()] = value.strip()
    if getattr(args, "resume", None) is not None:
        found["run.resume"] = args.resume
    return found


def _variants(as_json: bool) -> int:
    rows = {name: (variant.__doc__ or "").strip() for name, variant in VARIANTS.items()}
    if as_json:
        print(json.dumps({"default": DEFAULT_VARIANT, "variants": rows}))
    else:
        for name, text in rows.items():
            print(f"{name:<12}{text}")
    return 0
