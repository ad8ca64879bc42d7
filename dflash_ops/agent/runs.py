"""The run registry: what run.json, exit.json, metrics.jsonl and the process table say about each run.

A state is derived each time from evidence, by `dflash_ops.health`; nothing on disk can claim that a dead run is
running.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_ops.agent import files, process, records
from dflash_ops.agent.layout import RUN_ID, Layout
from dflash_ops.agent.process import Identity
from dflash_ops.errors import UsageError
from dflash_ops.events import Event, parse_events
from dflash_ops.health import ExitFacts, RunFacts, State, assess

METRICS_TAIL = 1 << 16
STEP_DIRECTORY = re.compile(r"step-[0-9]{8,}\Z")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """run.json. Values of the environment are never written, only names: they may be secrets."""

    run_id: str
    nonce: str
    variant: str
    release: str
    created_at: float
    argv: tuple[str, ...]
    log: str
    launcher: str
    session: str
    """tmux session or systemd unit; empty under nohup."""
    host: str
    boot: str
    launched_by: Identity
    overrides: dict[str, str] = field(default_factory=dict)
    resumed_from: str | None = None
    env_names: tuple[str, ...] = ()
    state: str = "starting"
    supervisor: Identity | None = None
    trainer: Identity | None = None
    started_at: float | None = None
    keep_alive: int = 0
    """How many restarts by itself the operator allows."""
    attempt: int = 1
    """Which life of the trainer this is; `log` is its own."""


@dataclass(frozen=True, slots=True)
class ExitRecord:
    """exit.json, written by the supervisor after the trainer's end."""

    code: int | None
    signal: str | None
    ended_at: float
    boot: str
    oom_kills: int | None = None
    """Kernel OOM kills in this cgroup during the run; None where they cannot be read."""
    forwarded: tuple[str, ...] = ()
    """Signals passed on to the trainer, in order."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest numbers of metrics.jsonl; None where the run has not said them."""

    step: int | None = None
    loss: float | None = None
    accept_len: float | None = None
    context_tokens_per_s: float | None = None
    checkpoint: str | None = None
    time: float | None = None
    end: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One run as it stands."""

    run_id: str
    state: str
    detail: str
    variant: str
    release: str
    created_at: float
    directory: str
    log: str
    launcher: str
    session: str
    pid: int | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    signal: str | None = None
    latest: Latest = field(default_factory=Latest)
    overrides: dict[str, str] = field(default_factory=dict)
    attempt: int = 1

    @property
    def live(self) -> bool:
        return State(self.state).live


def read_run(directory: Path) -> RunRecord | None:
    try:
        return records.load(RunRecord, files.read_json(directory / "run.json"))
    except ValueError:
        return None


def write_run(directory: Path, record: RunRecord) -> None:
    files.write_json(directory / "run.json", records.dump(record))


def read_exit(directory: Path) -> ExitRecord | None:
    try:
        return records.load(ExitRecord, files.read_json(directory / "exit.json"))
    except ValueError:
        return None


def write_exit(directory: Path, record: ExitRecord) -> None:
    files.write_json(directory / "exit.json", records.dump(record))


def directories(layout: Layout) -> list[Path]:
    """Run directories, newest first. Names sort by time."""
    try:
        names = [path.name for path in layout.runs.iterdir() if RUN_ID.match(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [layout.run(name) for name in sorted(names, reverse=True)]


def statuses(layout: Layout) -> Iterator[RunStatus]:
    """Every run's status: one that lives first, then the newest. A clock that was set back must not hide a run."""

    def order(pair: tuple[RunRecord, Path]) -> tuple[bool, float]:
        record = pair[0]
        return process.alive(record.supervisor) or process.alive(record.trainer), record.created_at

    found = ((record, path) for path in directories(layout) if (record := read_run(path)) is not None)
    ordered = sorted(found, key=order, reverse=True)
    for record, path in ordered:
        yield derive(record, path)


def find(layout: Layout, run_id: str) -> RunStatus | None:
    """The run asked for, or the newest where `run_id` is empty; UsageError where a named one does not exist."""
    if not run_id:
        return next(statuses(layout), None)
    record = read_run(layout.run(run_id)) if RUN_ID.match(run_id) else None
    if record is None:
        raise UsageError(f"no run {run_id[:80]!r} on this target", hint="`fab runs` lists them")
    return derive(record, layout.run(run_id))


def live_run(layout: Layout) -> RunStatus | None:
    return next((status for status in statuses(layout) if status.live), None)


def derive(record: RunRecord, directory: Path) -> RunStatus:
    """The status of one run, from evidence."""
    events = read_events(directory)
    end = read_exit(directory)
    if end is None and not process.alive(record.supervisor):
        # The exit record is written before the supervisor ends, so a second look cannot miss it.
        end = read_exit(directory)
    health = assess(_facts(record, end), events)
    return RunStatus(
        run_id=record.run_id,
        state=health.state.value,
        detail=health.evidence,
        variant=record.variant,
        release=record.release,
        created_at=record.created_at,
        directory=str(directory),
        log=record.log,
        launcher=record.launcher,
        session=record.session,
        pid=record.trainer.pid if record.trainer else None,
        ended_at=end.ended_at if end else None,
        exit_code=end.code if end else None,
        signal=end.signal if end else None,
        latest=_latest(events),
        overrides=record.overrides,
        attempt=record.attempt,
    )


def checkpoint_names(directory: Path) -> list[str]:
    """The complete checkpoints of a run, oldest first; a checkpoint is complete once it has its name."""
    try:
        names = [entry.name for entry in (directory / "checkpoints").iterdir() if STEP_DIRECTORY.match(entry.name)]
    except OSError:
        return []
    return sorted(names, key=lambda name: int(name[5:]))


def newest_checkpoint_name(directory: Path) -> str | None:
    return next(reversed(checkpoint_names(directory)), None)


def newest_step(directory: Path) -> int:
    """The step of the newest checkpoint; -1 where there is none."""
    name = newest_checkpoint_name(directory)
    return int(name[5:]) if name else -1


def read_events(directory: Path, tail: int = METRICS_TAIL) -> tuple[Event, ...]:
    """The newest events of the newest attempt, from the last `tail` bytes of metrics.jsonl."""
    try:
        with (directory / "metrics.jsonl").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - tail))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    # A line that the cut has broken is no JSON any more and is skipped like every other broken line.
    events = parse_events(text)
    begins = max((index for index, event in enumerate(events) if event.kind == "start"), default=0)
    return events[begins:]


def _facts(record: RunRecord, end: ExitRecord | None) -> RunFacts:
    return RunFacts(
        now=time.time(),
        created=record.created_at,
        launch_boot=record.boot,
        boot=process.boot(),
        launcher_alive=process.alive(record.launched_by),
        supervisor_alive=process.alive(record.supervisor) if record.supervisor else None,
        trainer_alive=process.alive(record.trainer) if record.trainer else None,
        trainer_pid=record.trainer.pid if record.trainer else None,
        exit=ExitFacts(end.code, end.signal, end.oom_kills, bool(end.forwarded), end.reason) if end else None,
        stop_requested=record.state == "stopping",
        restarting=record.attempt if record.state == "restarting" else None,
    )


def _latest(events: tuple[Event, ...]) -> Latest:
    newest: dict[str, Any] = {}
    for event in events:
        newest["time"] = event.time
        match event.kind:
            case "step":
                newest["step"] = event.step
                newest |= {key: event.number(key) for key in ("loss", "accept_len", "context_tokens_per_s")}
            case "checkpoint":
                newest["checkpoint"] = event.values.get("path")
            case "end":
                newest["end"] = dict(event.values)
    try:
        return records.load(Latest, newest)
    except ValueError:
        return Latest()
