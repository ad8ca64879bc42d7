"""Launch on the target: lock, gate, cache, run record, supervisor, in this order and under one lock."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from dflash_ops.agent import cache, files, gate, handover, launchers, lock, process, releases, runs, trainer_cli
from dflash_ops.agent.gate import GateReport, GateRequest
from dflash_ops.agent.handover import Assignment
from dflash_ops.agent.layout import Layout
from dflash_ops.agent.runs import ExitRecord, RunRecord
from dflash_ops.errors import AgentFailed, LockHeld, OpsError, UsageError

DEFAULT_VARIANT = "threadwarm"
HANDOVER_S = 30.0
AGENT = str(Path(__file__).parents[2])
"""The zipapp that this file is in: Python runs it as a program."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Everything one launch needs to know."""

    nonce: str
    who: str
    variant: str = ""
    """Empty: the resumed run's, else threadwarm."""
    overrides: dict[str, str] = field(default_factory=dict)
    """The trainer's --set, in order."""
    resume: str = ""
    """A run id, `auto` (the newest run with a checkpoint), or empty."""
    keep_cache: bool = False
    keep_alive: int = 0
    launcher: str = "auto"
    session: str = "dflash"
    env: dict[str, str] = field(default_factory=dict)
    legacy_caches: tuple[str, ...] = ()
    gate: GateRequest = field(default_factory=GateRequest)


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """A run that its supervisor has taken over."""

    run_id: str
    release: str
    variant: str
    directory: str
    log: str
    pid: int
    launcher: str
    session: str
    gpus: tuple[str, ...]
    resumed_from: str | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is going to run, settled before anything is written."""

    run_id: str
    release: str
    variant: str
    overrides: dict[str, str]
    resumed_from: str | None
    launcher: str


def launch(layout: Layout, request: LaunchRequest, say: Say) -> LaunchResult:
    """Start one run or raise with nothing started; see the module's docstring for the order."""
    plan = _plan(layout, request)
    launchers.check(layout, plan.launcher)
    release = layout.release(plan.release)
    env = trainer_cli.environment(
        cache.environment(layout, plan.release)
        | {"DFLASH_RELEASE": plan.release, "DFLASH_RUN_ID": plan.run_id}
        | request.env
    )
    try:
        descriptor = lock.acquire(layout, "a launch", plan.run_id, request.who)
    except LockHeld:
        if request.variant or request.overrides:  # a wrong word is told also while a run goes
            trainer_cli.check_config(release, env, plan.variant, plan.overrides)
        raise
    try:
        trainer_cli.check_config(release, env, plan.variant, plan.overrides)
        report = gate.inspect(layout, request.gate)
        gate.require_open(report)
        for check in report.checks:
            say(f"gate: {check.name}: {check.detail}")
        if not request.keep_cache:
            for line in cache.clear(layout, [plan.release], request.legacy_caches):
                say(f"cache: {line}")
        Path(env["TORCHINDUCTOR_CACHE_DIR"]).mkdir(parents=True, exist_ok=True)
        Path(env["TRITON_CACHE_DIR"]).mkdir(parents=True, exist_ok=True)
        record = _write_record(layout, request, plan, env)
        assignment = Assignment(
            directory=str(layout.run(plan.run_id)),
            argv=record.argv,
            cwd=str(release),
            env=env,
            header=_header(record, report),
            keep_alive=request.keep_alive,
        )
        return _start(layout, record, assignment, descriptor, report, say)
    except OSError as error:
        raise files.disk_error(error, "preparing the run") from None
    finally:
        os.close(descriptor)  # the supervisor and the trainer hold copies by now, or nobody does


def newest_checkpoint(directory: Path) -> Path | None:
    """The highest complete step-N directory of a run; a checkpoint is complete once it has its name."""
    name = runs.newest_checkpoint_name(directory)
    return directory / "checkpoints" / name if name else None


def _plan(layout: Layout, request: LaunchRequest) -> _Plan:
    release = releases.require_whole(layout)
    variant, overrides, resumed_from = request.variant, dict(request.overrides), None
    if request.resume:
        record, checkpoint = _resumed(layout, request)
        variant = record.variant
        overrides = {key: value for key, value in record.overrides.items() if key != "run.resume"} | overrides
        overrides["run.resume"] = resumed_from = str(checkpoint)
    variant = variant or DEFAULT_VARIANT
    if not re.match(r"[a-z0-9_]{1,40}\Z", variant):
        raise UsageError(
            f"{variant!r} is no variant's name", hint="letters, digits and _; see `python -m trainer variants`"
        )
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    launcher, _ = launchers.choose(request.launcher)
    return _Plan(f"{stamp}-{variant}-{secrets.token_hex(2)}", release, variant, overrides, resumed_from, launcher)


def _resumed(layout: Layout, request: LaunchRequest) -> tuple[RunRecord, Path]:
    """The run to go on from and its newest checkpoint."""
    if request.resume == "auto":
        for directory in runs.directories(layout):
            record = runs.read_run(directory)
            checkpoint = newest_checkpoint(directory)
            if record and checkpoint and request.variant in ("", record.variant):
                return record, checkpoint
        raise UsageError("no run on this target has a checkpoint to go on from", hint="launch without --resume")
    status = runs.find(layout, request.resume)
    record = runs.read_run(layout.run(request.resume))
    if status is None or record is None:
        raise UsageError(f"no run {request.resume!r} on this target", hint="`fab runs` lists them")
    if request.variant not in ("", record.variant):
        raise UsageError(
            f"run {request.resume} is a {record.variant} run, not {request.variant}",
            hint="leave --variant out: a resumed run keeps its variant",
        )
    checkpoint = newest_checkpoint(layout.run(request.resume))
    if checkpoint is None:
        raise UsageError(f"run {request.resume} has written no checkpoint", hint="launch without --resume")
    return record, checkpoint


def _write_record(layout: Layout, request: LaunchRequest, plan: _Plan, env: dict[str, str]) -> RunRecord:
    """The run directory with run.json in state `starting`: from here on the nonce can be asked for."""
    directory = layout.run(plan.run_id)
    directory.mkdir(parents=True, mode=0o700)
    me = process.identify(os.getpid())
    if me is None:
        raise AgentFailed("the agent cannot find itself in /proc")
    record = RunRecord(
        run_id=plan.run_id,
        nonce=request.nonce,
        variant=plan.variant,
        release=plan.release,
        created_at=time.time(),
        argv=trainer_cli.train_argv(plan.variant, plan.release, directory, plan.overrides),
        log=str(directory / "train.log"),
        launcher=plan.launcher,
        session=request.session if plan.launcher == "tmux" else "",
        host=socket.gethostname(),
        boot=process.boot(),
        launched_by=me,
        overrides=plan.overrides,
        resumed_from=plan.resumed_from,
        env_names=tuple(sorted(env)),
        keep_alive=request.keep_alive,
    )
    runs.write_run(directory, record)
    (directory / "train.log").touch(mode=0o644)
    files.flip_link(layout.newest_log(plan.variant), str(directory / "train.log"))
    return record


def _start(
    layout: Layout, record: RunRecord, assignment: Assignment, descriptor: int, report: GateReport, say: Say
) -> LaunchResult:
    directory = layout.run(record.run_id)
    argv = (sys.executable, "-I", "-B", AGENT, "supervise", record.nonce, record.run_id)
    # From here a deadline must not cut in: it could call a run failed that has just started. The steps below have
    # their own limits.
    signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        with handover.listen(record.nonce) as server:
            launched = launchers.start(layout, record.launcher, record.session, record.run_id, argv)
            if launched.session != record.session:
                record = replace(record, session=launched.session)
                runs.write_run(directory, record)
            taken = handover.give(server, assignment, descriptor, HANDOVER_S)
    except (OSError, OpsError) as error:
        if runs.read_exit(directory) is None:
            reason = f"the launch failed: {error}"
            runs.write_exit(directory, ExitRecord(None, None, time.time(), process.boot(), reason=reason))
        raise
    if taken.trainer_pid is None:
        raise AgentFailed("the trainer cannot start", why=taken.error)
    started = runs.read_run(directory) or record
    holder = lock.read_holder(layout)
    if holder is not None:
        lock.sign(layout, replace(holder, process=started.supervisor, trainer=started.trainer))
    say(f"started under {record.launcher}, pid {taken.trainer_pid}")
    return LaunchResult(
        run_id=record.run_id,
        release=record.release,
        variant=record.variant,
        directory=str(directory),
        log=record.log,
        pid=taken.trainer_pid,
        launcher=record.launcher,
        session=record.session,
        gpus=report.gpus,
        resumed_from=record.resumed_from,
    )


def _header(record: RunRecord, report: GateReport) -> tuple[str, ...]:
    """The log's first lines: what the trainer cannot know. Its own header follows, with the whole configuration."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    overrides = " ".join(f"{key}={value}" for key, value in record.overrides.items())
    return (
        f"run {record.run_id}",
        f"release {record.release}",
        f"variant {record.variant}",
        f"overrides {overrides or 'none'}",
        f"resumed from {record.resumed_from or 'nothing'}",
        f"host {record.host}, cpuset {process.cpuset()}",
        f"GPUs {', '.join(report.gpus) or 'none: the CPU trains'}",
        f"versions {versions}",
    )
