"""The run registry: what run.json, exit.json, metrics.jsonl and the process table say about each run.

A state is derived each time from evidence; nothing on disk can claim that a dead run is running.

    starting   the launcher or the supervisor works, the trainer has said nothing yet
    warming    compiling and warming up behind the gate
    training   the gate is open
    finished   exit code 0
    failed     exit code above 0
    killed     ended by a signal
    lost       no record of an end and no process: killed with its supervisor, or the container restarted
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_ops.agent import files, process, records
from dflash_ops.agent.layout import RUN_ID, Layout
from dflash_ops.agent.process import Identity
from dflash_ops.errors import UsageError

LIVE = frozenset({"starting", "warming", "training"})
METRICS_TAIL = 1 << 16
START_GRACE_S = 60.0
"""How long a run without any process may count as starting: the launcher hands over within this."""


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

    @property
    def live(self) -> bool:
        return self.state in LIVE


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
    except FileNotFoundError:
        return []
    return [layout.run(name) for name in sorted(names, reverse=True)]


def statuses(layout: Layout) -> Iterator[RunStatus]:
    """Every run's status, newest first."""
    ordered = sorted(
        ((record, path) for path in directories(layout) if (record := read_run(path)) is not None),
        key=lambda pair: pair[0].created_at,
        reverse=True,
    )
    for record, path in ordered:
        yield derive(record, path)


def find(layout: Layout, run_id: str) -> RunStatus | None:
    """The run asked for, or the newest where `run_id` is empty; UsageError where a named one does not exist."""
    if not run_id:
        return next(statuses(layout), None)
    record = read_run(layout.run(run_id)) if RUN_ID.match(run_id) else None
    if record is None:
        raise UsageError(f"no run {run_id!r} on this target", hint="`fab runs` lists them")
    return derive(record, layout.run(run_id))


def live_run(layout: Layout) -> RunStatus | None:
    return next((status for status in statuses(layout) if status.live), None)


def derive(record: RunRecord, directory: Path) -> RunStatus:
    """The state, from evidence: exit record first, then processes, then what the trainer said."""
    latest, opened, warming = _read_metrics(directory / "metrics.jsonl")
    end = read_exit(directory)
    if end is None and not process.alive(record.supervisor):
        # The exit record is written before the supervisor ends, so a second look cannot miss it.
        end = read_exit(directory)
    if end is not None:
        state, detail = _ended(end)
    else:
        state, detail = _running(record, opened=opened, warming=warming)
    return RunStatus(
        run_id=record.run_id,
        state=state,
        detail=detail,
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
        latest=latest,
        overrides=record.overrides,
    )


def _ended(end: ExitRecord) -> tuple[str, str]:
    if end.signal is not None:
        detail = f"ended by {end.signal}"
        if end.oom_kills:
            detail += f"; the kernel killed {end.oom_kills} process(es) here for memory during the run"
        return "killed", detail
    if end.code == 0:
        return "finished", "stopped on request" if end.forwarded else "exit code 0"
    return "failed", end.reason or f"exit code {end.code}"


def _running(record: RunRecord, *, opened: bool, warming: bool) -> tuple[str, str]:
    if record.boot != process.boot():
        return "lost", "the container or its host restarted under the run"
    if record.supervisor is None:
        if process.alive(record.launched_by) or time.time() - record.created_at < START_GRACE_S:
            return "starting", "the launcher is handing over"
        return "lost", "the launch was cut off before the trainer started"
    trainer = process.alive(record.trainer)
    if not process.alive(record.supervisor):
        if trainer and record.trainer is not None:
            return "lost", f"its supervisor was killed; the trainer (pid {record.trainer.pid}) was told to stop"
        return "lost", "trainer and supervisor are gone and left no exit record: killed from outside"
    if record.trainer is None or (not trainer and not opened and not warming):
        return "starting", "the supervisor is starting the trainer"
    if opened:
        return "training", ""
    if warming:
        return "warming", "threads compile and warm up behind the gate"
    return "starting", "the trainer has not reported yet"


def _read_metrics(path: Path) -> tuple[Latest, bool, bool]:
    """(newest numbers, gate open, warm-up begun) from the end of metrics.jsonl."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - METRICS_TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return Latest(), False, False
    if size > METRICS_TAIL:
        lines = lines[1:]
    newest: dict[str, Any] = {}
    opened = warming = False
    for line in lines:
        try:
            entry = json.loads(line)
            event = entry["event"]
        except (ValueError, KeyError, TypeError):
            continue
        newest["time"] = entry.get("time")
        match event:
            case "start" | "warmup":
                warming = True
            case "gate_open":
                opened = True
            case "step":
                opened = True
                newest |= {key: entry.get(key) for key in ("step", "loss", "accept_len", "context_tokens_per_s")}
            case "checkpoint":
                newest["checkpoint"] = entry.get("path")
            case "end":
                newest["end"] = entry
    try:
        return records.load(Latest, newest), opened, warming
    except ValueError:
        return Latest(), opened, warming
