"""The verbs for living with a run: what is happening, what went wrong, what to keep. Thin, like `tasks`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from invoke.parser.argument import Argument
from rich.live import Live

from dflash_ops import board as boards
from dflash_ops import completion as completing
from dflash_ops import console, dashboard, pages
from dflash_ops import diagnose as diagnosing
from dflash_ops import doctor as examining
from dflash_ops import provision as provisioning
from dflash_ops import pull as pulling
from dflash_ops import watch as watching
from dflash_ops.agent import messages, records
from dflash_ops.agent.prune import PrunePlan, PruneRequest
from dflash_ops.agent.snapshot import WatchRequest
from dflash_ops.cli import READ_DEADLINE_S, fab_words, ns, only, operator, run_code, verb, whole_number
from dflash_ops.connect import connect, open_transport
from dflash_ops.diagnose import Finding
from dflash_ops.errors import INTERRUPTED, AgentFailed, EnvironmentUnfit, UsageError
from dflash_ops.executor import TargetContext
from dflash_ops.named_file import require_regular
from dflash_ops.remote import Place, Remote
from dflash_ops.scrub import scrub
from dflash_ops.settings import Target
from dflash_ops.watch import Notifier, View

HASHING_DEADLINE_S = 3600.0
"""The target may read a whole checkpoint for its hash."""


@verb()
def diagnose(c: TargetContext, run: str = "", json: bool = False, evidence: str = "", save: str = "") -> int:
    """Name what went wrong, with proof; --run ID, --json, --save FILE, --evidence FILE replays a saved one."""
    target = only(c, "diagnose")
    finding = diagnosing.replay(target.name, _read(evidence)) if evidence else _find(c, run)
    if save:
        _write(save, scrub(finding.evidence.to_bundle()))
    fab = fab_words(c, target)
    if json:
        console.show_json(diagnosing.as_json(finding, fab))
    else:
        for line in diagnosing.describe(finding, fab):
            console.say(line)
    return 0


@verb()
def doctor(c: TargetContext, quick: bool = False, json: bool = False) -> int:
    """Look at laptop, host and container, a fix for each fault; --quick skips torch, --json. Exits 24 on a fault."""
    target = only(c, "doctor")
    found = examining.examine(target, connect(target), quick=quick)
    if json:
        console.show_json(
            {"target": target.name, "fit": found.fit, "lines": [records.dump(line) for line in found.lines]}
        )
    else:
        console.table(
            ("where", "what", "verdict", "found"),
            [(line.place, line.name, line.verdict, line.detail) for line in found.lines],
        )
        for line in found.lines:
            if line.verdict != "ok" and line.fix:
                console.say(f"{line.place} {line.name}: {line.fix}")
    if found.error is not None:
        raise found.error
    return 0 if found.fit else EnvironmentUnfit.exit_code


@verb()
def report(c: TargetContext, run: str, out: str = "") -> int:
    """Write one HTML page about RUN (or `newest`): plots and facts, nothing loaded from anywhere; --out FILE."""
    target = only(c, "report")
    done = pages.write(target, connect(target), "" if run == "newest" else run, out, fab_words(c, target))
    console.say(f"{done.path}: run {done.run_id}, {done.events:,} events")
    return 0


@verb()
def pull(c: TargetContext, run: str = "", to: str = "runs", checkpoints: str = "all") -> int:
    """Bring a run's logs and checkpoints here, verified by hash; --run ID, --to DIR, --checkpoints all|newest|none."""
    target = only(c, "pull")
    done = pulling.pull(connect(target), run, Path(to).expanduser(), checkpoints, console.remark)
    console.say(f"{done.directory}: {done.files} files, {done.unchanged} were here already, {done.moved:,} bytes moved")
    return 0


@verb()
def prune(c: TargetContext, keep: str = "2", dry_run: bool = False, yes: bool = False, json: bool = False) -> int:
    """Remove old checkpoints of ended runs, never the last good one; --keep N a run, --dry-run, --yes, --json."""
    target = only(c, "prune")
    remote = connect(target)
    request = PruneRequest(who=operator(), keep=whole_number("--keep", keep, 1, 1000))
    plan = remote.call("prune", request, PrunePlan, deadline=HASHING_DEADLINE_S, on_progress=console.remark)
    if json and (dry_run or not plan.candidates):
        console.show_json({"target": target.name, **records.dump(plan)})
        return 0
    if not json:
        rows = [(one.path, f"{one.size:,}", one.why) for one in plan.candidates]
        console.table(("may go", "bytes", "why"), rows)
        console.say(f"{len(rows)} may go, {sum(one.size for one in plan.candidates):,} bytes; {plan.kept} stay")
    if dry_run or not plan.candidates:
        return 0
    if not yes:
        console.confirm(f"remove these {len(plan.candidates)} from {target.name}", "prune")
    request = dataclasses.replace(request, remove=tuple(one.path for one in plan.candidates))
    done = remote.call("prune", request, PrunePlan, deadline=HASHING_DEADLINE_S, on_progress=console.remark)
    if json:
        console.show_json({"target": target.name, **records.dump(done)})
    else:
        console.say(f"removed {len(done.removed)}, {done.freed:,} bytes are free again")
    return 0


@verb()
def provision(c: TargetContext, lock: str = "environment.lock", wheelhouse: str = "", base_python: str = "") -> int:
    """Build the target's environment from a hashed lock; --lock FILE, --wheelhouse DIR, --base-python PATH."""
    target = only(c, "provision")
    house = Path(wheelhouse).expanduser() if wheelhouse else None
    done = provisioning.provision(connect(target), target, Path(lock), house, base_python, operator(), console.remark)
    console.say(f"environment {done.environment} {'is built' if done.built else 'was there already'} and in use")
    if target.python != done.python:
        console.say(f"next: set python: {done.python} for {target.name} in hosts.yaml")
    return 0


@verb()
def tensorboard(c: TargetContext, run: str = "", port: str = "6006") -> int:
    """Start TensorBoard on the target and show it on a port here; --run ID, --port N."""
    target = only(c, "tensorboard")
    number = whole_number("--port", port, 0, 65535)
    remote = connect(target)
    carrier = remote_of_its_own(target)
    for one in (remote, carrier):  # connected before threads share it, and a wrong run is refused here
        one.call("status", messages.StatusRequest(run_id=run), messages.Overview, deadline=READ_DEADLINE_S)
    try:
        ended = boards.show(remote, carrier, run, number, console.say)
    except KeyboardInterrupt:
        return 0  # Ctrl-C is how it is meant to end
    console.remark(f"TensorBoard ended with {ended.code}")
    return AgentFailed.exit_code


@verb()
def completion(c: TargetContext) -> int:
    """Print the completion script for bash and zsh: source <(fab completion)."""
    flags = {name: sorted(flag for one in ns[name].get_arguments() for flag in _flags(one)) for name in ns.task_names}
    print(completing.script(flags))
    return 0


def _flags(argument: Argument) -> list[str]:
    return [f"--{name}" for name in argument.names if len(name) > 1]


@verb()
def watch(
    c: TargetContext,
    run: str = "",
    interval: str = "2",
    notify: str = "",
    until_end: bool = False,
    json: bool = False,
) -> int:
    """A live picture of the run; --run ID, --json, --notify COMMAND (JSON on stdin), --until-end, --interval S."""
    target = only(c, "watch")
    remote = connect(target)
    remote.call("status", messages.StatusRequest(run_id=run), messages.Overview, deadline=READ_DEADLINE_S)
    request = WatchRequest(run, float(whole_number("--interval", interval, 1, 60)))
    fab = fab_words(c, target)

    def explain(view: View) -> dict[str, Any]:
        finding = diagnosing.find(target, remote_of_its_own(target), view.run_id)
        return {"diagnosis": diagnosing.as_json(finding, fab)}

    notifier = Notifier.of(notify, console.remark, explain) if notify else None
    try:
        return _watch(watching.views(remote, target.name, request), notifier, until_end=until_end, as_json=json)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if notifier is not None:
            notifier.close()


def _watch(views: Iterator[View], notifier: Notifier | None, *, until_end: bool, as_json: bool) -> int:
    history, before = dashboard.History(), ""
    picture = None if as_json or not sys.stdout.isatty() else Live(screen=True, auto_refresh=False)
    with picture or contextlib.nullcontext():
        for view in views:
            history.add(view)
            if as_json:
                console.show_json(watching.as_json(view))
            elif picture is not None:
                picture.update(dashboard.draw(view, history, width=picture.console.width), refresh=True)
            elif view.state != before:
                console.say(dashboard.one_line(view))
            before = view.state
            if notifier is not None:
                notifier.see(view)
            if until_end and view.ended:
                break
    run = view.snapshot.run if view.snapshot else None
    if picture is not None and run is not None:
        console.remark(dashboard.one_line(view))
    return run_code(run) if run is not None else 0


def remote_of_its_own(target: Target) -> Remote:
    """A second connection: the first one is busy with the stream of snapshots."""
    return Remote(open_transport(target), Place(target.python, target.root, target.workspace))


def _find(c: TargetContext, run: str) -> Finding:
    target = only(c, "diagnose")
    return diagnosing.find(target, connect(target), run)


def _read(name: str) -> str:
    try:
        return require_regular(Path(name)).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{name}: cannot be read", why=error.strerror or str(error)) from None


def _write(name: str, text: str) -> None:
    path = require_regular(Path(name))
    try:
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
    except OSError as error:
        raise UsageError(f"{name}: cannot be written", why=error.strerror or str(error)) from None
