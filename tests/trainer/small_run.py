"""A run small enough for tests, made of the real parts: shipped target, real data, real steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.setting import SMALLER
from trainer.assembly import assemble
from trainer.checkpoint import CheckpointStore, Loaded
from trainer.config import TrainConfig
from trainer.metrics import Metrics
from trainer.parts import Parts
from trainer.pipeline import Pipeline
from trainer.topology import Hardware
from trainer.variants import config_for

SMALL: dict[str, str] = SMALLER | {
    "drafter.num_heads": "2",
    "drafter.num_kv_heads": "1",
    "run.max_steps": "6",
    "run.log_every": "1",
    "run.eval_every": "3",
    "run.checkpoint_every": "3",
    "run.tensorboard": "false",
    "run.decode_prompts": "1",
    "run.decode_tokens": "8",
    "run.gate_deadline_s": "120",
    "run.stall_deadline_s": "120",
}


def small_config(overrides: Mapping[str, str] | None = None, variant: str = "threadwarm") -> TrainConfig:
    return config_for(variant, {**SMALL, **(overrides or {})}, Hardware())


def small_flags(overrides: Mapping[str, str] | None = None) -> list[str]:
    """The same overrides for the command line."""
    return [word for key, value in {**SMALL, **(overrides or {})}.items() for word in ("--set", f"{key}={value}")]


def small_parts(config: TrainConfig) -> Parts:
    """The real ones; only the process-wide ban on compiling is left out, other tests share this process."""
    return replace(assemble(config), on_gate_open=lambda: None)


def run_small(
    config: TrainConfig, directory: Path, *, parts: Parts | None = None, resumed: Loaded | None = None
) -> tuple[int, Pipeline]:
    metrics = Metrics(directory)
    store = CheckpointStore(directory / "checkpoints", keep_last=config.run.keep_last)
    pipeline = Pipeline(config, parts or small_parts(config), metrics, store, resumed=resumed)
    return pipeline.run(), pipeline


def events(directory: Path, kind: str | None = None) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in (None, row["event"])]
