"""The gated pipeline against what its two stages reach alone, on the same devices and in the same process.

Threads, gate, channels and steps are those of `train`, built by the same assembly; only the rows are synthetic (random
tokens, documents of one length) and nothing is evaluated or written. Where targets and drafters share one device a
batch costs it the seconds of both, so no order of work passes more than 1 / (1 / target + 1 / drafter) tokens a second.
On devices of their own the slower stage is the bound. With data.reuse a drafter counts with all its times a batch.

The pipeline is timed between two logged steps in its middle: before them channels fill, and after them the targets have
nothing left to do while drafters finish.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from trainer import torch_setup
from trainer.assembly import assemble
from trainer.bench.measure import BenchError, time_work
from trainer.bench.shapes import SHAPES, bench_config, random_drafter
from trainer.bench.synthetic import ROWS, NothingKept, SyntheticRows, on_thread
from trainer.bench.target import target_config
from trainer.config import RunConfig, TopologyConfig, TrainConfig, override
from trainer.data.batch import HiddenBatch, PackedBatch
from trainer.metrics import Metrics
from trainer.parts import Evaluation, Parts
from trainer.pipeline import EXIT_DONE, Pipeline
from trainer.topology import check_topology, probe_hardware

STEPS = 30
MARKS = 6
"""Logged steps of a run; it is timed from the second to the last but one."""
NEVER = 10**9


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """One configuration's figures; tokens are context tokens."""

    shape: str
    documents: int
    tokens: int
    """Of one batch."""
    targets: str
    """Devices."""
    drafters: str
    graphs: str
    settings: dict[str, str]
    """What differs from the benchmark's own configuration."""
    target_tokens_per_s: float
    """One target alone."""
    drafter_tokens_per_s: float
    """One drafter alone."""
    bound: str
    """`harmonic`: one device does both; `slower stage`: each has devices of its own."""
    bound_tokens_per_s: float
    pipeline_tokens_per_s: float
    spread_tokens_per_s: float
    """Fastest less slowest stretch between two logged steps."""
    of_bound: float
    steps: int
    """Timed ones."""
    recompiles: int
    """Since the gate opened."""
    memory_gb: float
    """Of the fullest device at the last timed step; on a CPU the process's peak."""
    memory_growth_gb: float
    """Over the timed steps."""
    ceiling_tflops: float
    """Of this run's matmul, before it began."""
    balance: str
    note: str


def bench_pipeline(
    name: str,
    documents: int,
    *,
    targets: Sequence[str],
    drafters: Sequence[str],
    steps: int = STEPS,
    repeats: int = 12,
    ceiling: float = 0.0,
    settings: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> PipelineResult:
    """Measure target alone, drafter alone, then both in the pipeline. `settings` override the run's configuration.

    `tell` hears each rate as soon as it is there: at real size all of it takes minutes.
    Raises BenchError where the shape or the devices cannot be measured, TargetError, ConfigError as a run does.
    """
    kind = bound_of(targets, drafters)
    check_topology(TopologyConfig(target=tuple(targets), drafter=tuple(drafters), verifier=()), probe_hardware())
    device = torch.device(drafters[0])
    if device.type == "cpu" and name != "tiny":
        raise BenchError(
            f"bench pipeline --shape {name} needs a CUDA device: its target alone has tens of gigabytes; use --shape "
            "tiny here"
        )
    config = override(pipeline_config(name, documents, targets, drafters, steps), dict(settings or {}))
    parts = assemble(
        config, make_drafter=lambda config, target: random_drafter(target.drafter_shape(config.drafter), device)
    )
    source = SyntheticRows(config, vocab_size=_vocab_size(parts), documents=documents)
    tokens = config.data.token_budget
    tell("target loaded")
    target_rate = tokens / on_thread("target", targets[0], lambda: _target_alone(parts, source.rows, repeats))
    tell(f"one target alone: {target_rate:,.0f} context tokens/s")
    drafter_rate = tokens / on_thread("drafter", drafters[0], lambda: _drafter_alone(parts, source.rows, repeats))
    tell(f"one drafter alone: {drafter_rate:,.0f} context tokens/s")
    _free(device)
    fresh_rate = drafter_rate / config.data.reuse
    if kind == "harmonic":
        bound = 1.0 / (1.0 / target_rate + 1.0 / fresh_rate)
    else:
        bound = min(target_rate * len(targets), fresh_rate * len(drafters))
    marks, recompiles = _run(config, parts, source)
    rates = [(b.tokens - a.tokens) / (b.time - a.time) for a, b in pairwise(marks)]
    whole = (marks[-1].tokens - marks[0].tokens) / (marks[-1].time - marks[0].time)
    memory = [mark.memory_gb for mark in marks]
    on_cpu = device.type == "cpu"
    return PipelineResult(
        shape=name,
        documents=documents,
        tokens=tokens,
        targets=",".join(targets),
        drafters=",".join(drafters),
        graphs=config.graphs,
        settings=dict(settings or {}),
        target_tokens_per_s=target_rate,
        drafter_tokens_per_s=drafter_rate,
        bound=kind,
        bound_tokens_per_s=bound,
        pipeline_tokens_per_s=whole,
        spread_tokens_per_s=max(rates) - min(rates),
        of_bound=whole / bound,
        steps=marks[-1].step - marks[0].step,
        recompiles=recompiles,
        memory_gb=memory[-1],
        memory_growth_gb=max(memory) - memory[0],
        ceiling_tflops=ceiling,
        balance=marks[-1].balance,
        note="CPU threads share cores: the bound means nothing here" if on_cpu else "",
    )


def bound_of(targets: Sequence[str], drafters: Sequence[str]) -> str:
    """Which bound holds. Raises BenchError where neither does."""
    if len({*targets, *drafters}) == 1:
        return "harmonic"
    if len({*targets, *drafters}) == len(targets) + len(drafters):
        return "slower stage"
    raise BenchError(
        f"no bound is known for targets on {', '.join(targets)} and drafters on {', '.join(drafters)}: put all on one "
        "device, or each on a device of its own (--targets, --drafters)"
    )


def pipeline_config(
    name: str, documents: int, targets: Sequence[str], drafters: Sequence[str], steps: int
) -> TrainConfig:
    """The benchmark's run: long enough that its middle is steady, nothing evaluated or saved on the way."""
    shape, device = SHAPES[name], torch.device(drafters[0])
    base = bench_config(
        shape, documents, attention="flex", graphs="step" if device.type == "cuda" else "none", device=device
    )
    run = RunConfig()
    # What targets may be ahead by, in steps, has to fit into one stretch at either end.
    stretch = max(steps // MARKS, (run.queue_depth + 1) * len(targets) + 2)
    return replace(
        base,
        target=replace(
            target_config(name, "auto", torch.device(targets[0]), compile=None), num_features=shape.features
        ),
        topology=TopologyConfig(target=tuple(targets), drafter=tuple(drafters), verifier=(targets[0],)),
        run=replace(
            run,
            max_steps=stretch * MARKS,
            log_every=stretch,
            eval_every=NEVER,
            checkpoint_every=NEVER,
            decode_prompts=0,
            tensorboard=False,
        ),
    )


def _target_alone(parts: Parts, rows: Sequence[PackedBatch], repeats: int) -> float:
    """Seconds for a batch."""
    target: Any = parts.target(0)
    timing = time_work(lambda i: target.hidden_states(rows[i % ROWS]), target.device, repeats=repeats)
    return timing.median_ms / 1e3


def _drafter_alone(parts: Parts, rows: Sequence[PackedBatch], repeats: int) -> float:
    """Seconds for a batch."""
    step: Any = parts.step(0)
    step.warm_up()
    batches = []
    for index, packed in enumerate(rows[:2]):
        generator = torch.Generator(step.device).manual_seed(index)
        hidden_TKH = torch.empty_like(step.inputs.hidden_TKH).normal_(generator=generator)
        batches.append(HiddenBatch(packed, hidden_TKH))

    def whole(index: int) -> None:
        step.load(batches[index % 2])
        step.accumulate()
        step.apply()

    return time_work(whole, step.device, repeats=repeats).median_ms / 1e3


@dataclass(frozen=True, slots=True)
class _Mark:
    step: int
    time: float
    tokens: int
    memory_gb: float
    balance: str


def _run(config: TrainConfig, parts: Parts, source: SyntheticRows) -> tuple[list[_Mark], int]:
    """(the timed run's logged steps, graphs compiled since the gate opened)."""
    counts: list[torch_setup.CompileCounts] = []

    def opened() -> None:
        parts.on_gate_open()
        counts.append(torch_setup.compile_counts())

    def nothing(weights: dict[str, torch.Tensor], *, last: bool) -> Evaluation:
        return Evaluation(0.0, [], 0)

    ours = replace(parts, open_source=lambda cursor: source, evaluator=lambda rank: nothing, on_gate_open=opened)
    with tempfile.TemporaryDirectory(prefix="trainer-bench-") as directory, Path(os.devnull).open("wb") as quiet:
        metrics = Metrics(Path(directory), log_fd=quiet.fileno())
        try:
            code = Pipeline(config, ours, metrics, NothingKept(Path(directory) / "checkpoints")).run()
        finally:
            torch_setup.allow_compilation()
            gc.unfreeze()
        rows = [json.loads(line) for line in metrics.path.read_text().splitlines()]
    if code != EXIT_DONE:
        raise BenchError(f"the pipeline failed: {rows[-1].get('error')}")
    now = torch_setup.compile_counts()
    recompiles = (now.graphs - counts[-1].graphs) + (now.backends - counts[-1].backends)
    words = [row["text"] for row in rows if row["event"] == "balance"]
    stretch = config.run.log_every
    marks = [
        _Mark(
            row["step"], row["time"], row["tokens"], row["memory_gb"], words[-1] if words else "too few steps to tell"
        )
        for row in rows
        if row["event"] == "step" and 2 * stretch <= row["step"] <= config.run.max_steps - stretch
    ]
    return marks, recompiles


def _vocab_size(parts: Parts) -> int:
    target: Any = parts.target(0)
    return int(target.vocab_size)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
