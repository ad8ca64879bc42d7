"""Everything `fab watch` shows, as one record; sent again and again, each whole, so that a lost one costs nothing."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dflash_ops.agent import gpu_log, machine, records, runs
from dflash_ops.agent.gpu_log import Reading
from dflash_ops.agent.layout import Layout
from dflash_ops.agent.runs import RunStatus
from dflash_ops.agent.wire import Event as WireEvent
from dflash_ops.agent.wire import Progress
from dflash_ops.events import Event
from dflash_ops.health import step_interval

GPU_EVERY_S = 5.0
METRICS_TAIL = 1 << 18


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """`run_id` empty: always the newest run, also one that is launched later."""

    run_id: str = ""
    interval_s: float = 2.0


@dataclass(frozen=True, slots=True)
class WatchEnd:
    """The watcher has gone."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The newest step and what is usual for this run."""

    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    accept_len: float | None = None
    heldout_accept_len: float | None = None
    context_tokens_per_s: float | None = None
    usual_tokens_per_s: float | None = None
    """Median over the steps at hand."""
    step_interval_s: float | None = None
    memory_gb: float | None = None
    grad_norm: float | None = None
    queues: dict[str, float] = field(default_factory=dict)
    utilization: dict[str, float] = field(default_factory=dict)
    balance: str | None = None
    """The trainer's last word on which stage holds the run up."""
    warmed: tuple[str, ...] = ()
    """Threads that have passed the gate."""
    gate_open: bool = False
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None
    last_event: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a target. `time` is by the target's clock, like every time in it."""

    time: float
    run: RunStatus | None
    numbers: Numbers
    gpus: tuple[Reading, ...]
    disk_free_bytes: int | None
    memory_used: int | None
    memory_limit: int | None


def watch(layout: Layout, request: WatchRequest, emit: Callable[[WireEvent], bool]) -> WatchEnd:
    """Send snapshots until nobody listens. Writing is what finds that out, so the interval bounds the leak."""
    cards: tuple[Reading, ...] = ()
    cards_at = -GPU_EVERY_S
    interval = min(max(request.interval_s, 0.2), 60.0)
    while True:
        began = time.monotonic()
        if began - cards_at >= GPU_EVERY_S:
            cards, cards_at = gpu_log.read(), began
        shot = take(layout, request.run_id, cards)
        if not emit(Progress(json.dumps(records.dump(shot)))):
            return WatchEnd()
        time.sleep(max(0.0, interval - (time.monotonic() - began)))


def take(layout: Layout, run_id: str, cards: tuple[Reading, ...] = ()) -> Snapshot:
    """One snapshot now."""
    status = runs.find(layout, run_id)
    events = runs.read_events(Path(status.directory), METRICS_TAIL) if status is not None else ()
    disk = machine.disk(layout.workspace)
    memory = machine.memory()
    return Snapshot(
        time=time.time(),
        run=status,
        numbers=numbers(events),
        gpus=cards,
        disk_free_bytes=disk.free_bytes if disk else None,
        memory_used=memory.used,
        memory_limit=memory.limit,
    )


def numbers(events: tuple[Event, ...]) -> Numbers:
    """The newest values of each kind."""
    steps = [event for event in events if event.kind == "step"]
    last = steps[-1] if steps else None
    evaluated = next((event for event in reversed(events) if event.kind == "eval"), None)
    saved = next((event for event in reversed(events) if event.kind == "checkpoint"), None)
    balance = next((event.values.get("text") for event in reversed(events) if event.kind == "balance"), None)
    rates = [rate for event in steps if (rate := event.number("context_tokens_per_s")) is not None]
    most = last.number("max_steps") if last else None
    return Numbers(
        step=last.step if last else None,
        max_steps=int(most) if most is not None and math.isfinite(most) else None,
        loss=last.number("loss") if last else None,
        accept_len=last.number("accept_len") if last else None,
        heldout_accept_len=evaluated.number("accept_len") if evaluated else None,
        context_tokens_per_s=rates[-1] if rates else None,
        usual_tokens_per_s=statistics.median(rates) if rates else None,
        step_interval_s=step_interval(steps),
        memory_gb=last.number("memory_gb") if last else None,
        grad_norm=last.number("grad_norm") if last else None,
        queues=last.numbers("queues") if last else {},
        utilization=last.numbers("utilization") if last else {},
        balance=balance if isinstance(balance, str) else None,
        warmed=tuple(str(event.values.get("thread", "?")) for event in events if event.kind == "warmup"),
        gate_open=bool(steps) or any(event.kind == "gate_open" for event in events),
        checkpoint_step=saved.step if saved else None,
        checkpoint_time=saved.time if saved else None,
        last_event=events[-1].time if events else None,
    )
