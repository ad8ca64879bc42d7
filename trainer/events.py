"""What happens in a run, as frozen events: a line of metrics.jsonl each, and their lines in the human log."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The run begins; everything needed to understand or repeat it."""

    event: ClassVar[str] = "start"
    release: str
    variant: str
    config: dict[str, Any]
    versions: dict[str, str]
    gpus: list[str]
    cpuset: list[int]
    notes: list[str] = field(default_factory=list)
    """What differs from the request on this machine, said once."""
    resumed_from: str | None = None
    step: int = 0
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """A drafter is about to capture its step as CUDA graphs; its `warmup` follows."""

    event: ClassVar[str] = "capture"
    thread: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmup:
    """One thread passed the gate."""

    event: ClassVar[str] = "warmup"
    thread: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GateOpen:
    """Every warm-up is done; training begins."""

    event: ClassVar[str] = "gate_open"
    seconds: float
    """Since the process started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One logged optimizer step. Rates cover the time since the previous logged step."""

    event: ClassVar[str] = "step"
    step: int
    max_steps: int
    loss: float
    accept_len: float
    accuracy: float
    tokens: int
    """Context tokens trained on since the run began, resumed part included; each counts once, however often it is
    reused."""
    context_tokens_per_s: float
    block_tokens_per_s: float
    lr: float
    grad_norm: float
    memory_gb: float
    """GPU memory that torch holds on the fullest device, in GB; without a GPU the process's peak resident memory."""
    queues: dict[str, int]
    """Items waiting in each channel."""
    utilization: dict[str, float]
    """Share of the time in which each stage worked; of a stage on a GPU, its device on this stage's stream."""
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes of torch's allocator on each GPU: `reserved`, and the most `allocated` at once so far."""
    skipped_updates: int = 0
    """Steps so far that left the weights alone: no label in any batch, or a gradient that was not finite."""
    reused_context_tokens_per_s: float | None = None
    """Of batches that were trained on before (data.reuse), beside and never in `context_tokens_per_s`; None without."""
    reused_block_tokens_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Eval:
    """Acceptance length on held-out documents, bonus token included."""

    event: ClassVar[str] = "eval"
    step: int
    accept_len: float
    by_position: list[float]
    """Share of blocks whose first k drafted tokens were all accepted, k = 1..B-1."""
    blocks: int
    seconds: float
    decode_accept_len: float | None = None
    """The same from true speculative decoding of held-out prompts, where it was done."""
    decode_by_position: list[float] | None = None
    decode_rounds: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Where the stages' time went since the last such event; see `trainer.balance`."""

    event: ClassVar[str] = "balance"
    step: int
    steps: int
    """Optimizer steps that it covers."""
    bottleneck: str
    """`data`, `target`, `drafter`, `exchange`, `device` (one that targets and drafters share) or `verifier` (one that
    works on the slowest stage's device)."""
    text: str
    """All of it in one line."""
    seconds_per_batch: dict[str, float]
    """Seconds that one device of a kind spends on one batch that is trained on: data, target, drafter."""
    shares: dict[str, dict[str, float]]
    """Of each stage's time: busy, waiting for input, for output space, for the exchange, other."""
    targets: int
    """Devices of the targets; `drafters` likewise."""
    drafters: int
    best_targets: int | None
    """The split of the same GPUs that would pass most batches; None where there is none to advise."""
    best_drafters: int | None
    gain: float | None
    """How many times as fast as the present split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint is complete on disk."""

    event: ClassVar[str] = "checkpoint"
    step: int
    path: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The last event of every run that could still speak."""

    event: ClassVar[str] = "end"
    reason: str
    """`done`, `stopped`, `error` or `gate_deadline`."""
    exit_code: int
    step: int
    error: str | None = None
    culprit: str | None = None
    """The thread whose warm-up did not end."""
    summary: dict[str, Any] | None = None


Event = Start | Capture | Warmup | GateOpen | Step | Eval | Balance | Checkpoint | End


def human(event: Event) -> list[str]:
    """The human log's lines for one event: the only formatter there is."""
    match event:
        case Start():
            return _header(event)
        case Capture():
            return [f"capture   {event.thread}"]
        case Warmup():
            return [f"warm-up   {event.thread} ready after {event.seconds:.1f} s"]
        case GateOpen():
            return [f"gate      open {event.seconds:.1f} s after the start; training begins"]
        case Step():
            return [
                f"step {event.step:>6}/{event.max_steps}  loss {event.loss:.4f}  accept {event.accept_len:.3f}  "
                f"acc {event.accuracy:.3f}  lr {event.lr:.2e}  grad {event.grad_norm:.2f}  "
                f"ctx {event.context_tokens_per_s:,.0f} tok/s  blk {event.block_tokens_per_s:,.0f} tok/s  "
                f"{_reused(event)}mem {event.memory_gb:.2f} GB  busy "
                + " ".join(f"{name} {share:.0%}" for name, share in event.utilization.items())
                + (f"  skipped updates {event.skipped_updates}" if event.skipped_updates else "")
            ]
        case Eval():
            shares = " ".join(f"{share:.2f}" for share in event.by_position)
            measured = f"held-out acceptance length {event.accept_len:.3f}, by position {shares}"
            lines = [f"eval      step {event.step}: {measured} ({event.blocks} blocks, {event.seconds:.1f} s)"]
            if event.decode_accept_len is not None:
                shares = " ".join(f"{share:.2f}" for share in event.decode_by_position or [])
                lines.append(
                    f"decoded   step {event.step}: {event.decode_accept_len:.3f} tokens a target forward, by position "
                    f"{shares} ({event.decode_rounds} rounds)"
                )
            return lines
        case Balance():
            return [f"balance   step {event.step}: {event.text}"]
        case Checkpoint():
            return [f"saved     step {event.step}: {event.path} ({event.seconds:.1f} s)"]
        case End():
            words = {"done": "finished", "stopped": "stopped on request", "gate_deadline": "warm-up hung"}
            lines = [f"end       {words.get(event.reason, event.reason)} at step {event.step}, exit {event.exit_code}"]
            if event.culprit:
                lines.append(f"          culprit: {event.culprit}")
            if event.error:
                lines.extend(f"          {line}" for line in event.error.splitlines())
            return lines


def _reused(event: Step) -> str:
    if event.reused_context_tokens_per_s is None or event.reused_block_tokens_per_s is None:
        return ""
    return (
        f"reused ctx {event.reused_context_tokens_per_s:,.0f} tok/s  blk {event.reused_block_tokens_per_s:,.0f} tok/s  "
    )


def _header(event: Start) -> list[str]:
    lines = [
        f"release   {event.release}",
        f"variant   {event.variant}",
        f"pid       {event.pid}",
        "versions  " + ", ".join(f"{name} {version}" for name, version in event.versions.items()),
        "gpus      " + (", ".join(event.gpus) or "none"),
        f"cpuset    {_ranges(event.cpuset)} ({len(event.cpuset)} cores)",
    ]
    for group, values in event.config.items():
        if isinstance(values, dict):
            text = ", ".join(f"{key}={_plain(value)}" for key, value in values.items())
            lines.append(f"config    {group}: {text}")
        else:
            lines.append(f"config    {group}={_plain(values)}")
    if event.resumed_from:
        lines.append(f"resume    step {event.step} from {event.resumed_from}")
    lines.extend(f"note      {note}" for note in event.notes)
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(_plain(item) for item in value) + "]"
    return "none" if value is None else str(value)


def _ranges(cores: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5'."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts) or "unknown"
