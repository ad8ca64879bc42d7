"""The verbs: parse, call, print. What they do is in the modules that they call.

Every verb takes its targets from -H (`executor`), turns each foreseeable failure into lines and an exit code
(`verb`), and is run once per command line entry, in order: `fab deploy launch` is two calls.
"""

from __future__ import annotations

import atexit
import functools
import getpass
import json as jsonlib  # `json` is a flag of many verbs
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fabric import task
from invoke.collection import Collection
from invoke.exceptions import Exit

from dflash_ops import completion, console, hosts, release, tail
from dflash_ops import launch as launching
from dflash_ops.agent import records, verbs
from dflash_ops.agent.gate import GateReport
from dflash_ops.agent.releases import Deployed
from dflash_ops.agent.runs import RunStatus
from dflash_ops.agent.stop import StopRequest, StopResult
from dflash_ops.connect import close_all, connect
from dflash_ops.errors import INTERRUPTED, OpsError, RunFailed, RunLost, UsageError
from dflash_ops.executor import TargetContext
from dflash_ops.remote import Remote
from dflash_ops.settings import Target

AT_ONCE = 6
"""Targets asked at the same time."""
READ_DEADLINE_S = 60.0
STOP_SPARE_S = 60.0
"""What `stop` may take beyond its --wait: KILL, and the supervisor's last words."""
DEFAULT_LINES = "100"

ns = Collection()
atexit.register(close_all)
ResultT = TypeVar("ResultT")


def verb(*, iterable: tuple[str, ...] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a function a verb of `fab`: it returns its exit code, and its errors become lines and codes."""

    def decorate(body: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(body)
        def run(c: TargetContext, *args: Any, **kwargs: Any) -> None:
            code = guarded(lambda: body(c, *args, **kwargs))
            if code:
                raise Exit(code=code)

        ns.add_task(task(run, iterable=list(iterable)))
        return body

    return decorate


def guarded(body: Callable[[], int]) -> int:
    """The one mapper from failures to messages and exit codes."""
    try:
        return body()
    except OpsError as error:
        console.show_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        console.remark("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        console.end_quietly()
        return 0


@verb()
def deploy(c: TargetContext, dry_run: bool = False) -> int:
    """Ship trainer/ to the target; an unchanged tree moves nothing. --dry-run shows what would happen."""
    shipped = release.collect(hosts.checkout())

    def show(target: Target, remote: Remote) -> int:
        plan = release.plan(remote, shipped)
        _say(c, target, f"release {plan.release_id}; current is {plan.current or 'none'}")
        for line in plan.changes or ("no file differs",):
            _say(c, target, f"  {line}")
        _say(c, target, f"{plan.sends:,} bytes would be sent; these would run:")
        for argv in plan.commands:
            _say(c, target, f"  {jsonlib.dumps(argv, ensure_ascii=False)}")
        return 0

    def one(target: Target, remote: Remote) -> int:
        done = release.deploy(remote, shipped, who(), lambda text: _say(c, target, text), console.upload)
        if done.sent:
            text = f"release {done.release_id} is deployed: {done.files} files, {done.sent:,} bytes sent"
        elif done.result.changed:
            text = f"release {done.release_id} was there already: nothing sent, now current"
        else:
            text = f"release {done.release_id} is unchanged: nothing sent"
        _say(c, target, text)
        return 0

    return _each(c, show if dry_run else one)


@verb(iterable=("set",))
def launch(
    c: TargetContext,
    variant: str = "",
    set: list[str] | None = None,  # the flag is --set; a default of () would make Invoke split each word
    resume: str = "",
    keep_cache: bool = False,
    keep_alive: str = "0",
    launcher: str = "",
) -> int:
    """Start a run behind the gate, detached; --variant, --set k=v, --resume RUN|auto, --keep-cache, --keep-alive N."""
    restarts = _count("--keep-alive", keep_alive, 0, 100)
    options = launching.LaunchOptions(variant, tuple(set or ()), resume, keep_cache, restarts, launcher)

    def one(target: Target, remote: Remote) -> int:
        done = launching.launch(remote, target, options, who(), lambda text: _say(c, target, text))
        completion.remember(target.name, [done.run_id])
        _say(c, target, f"run {done.run_id} is started: release {done.release}, {done.launcher}, pid {done.pid}")
        if done.resumed_from:
            _say(c, target, f"goes on from {done.resumed_from}")
        _say(c, target, f"log {done.log}")
        _say(c, target, f"follow it: {_fab(c, target)} tail-log")
        return 0

    return _each(c, one)


@verb()
def tail_log(
    c: TargetContext, run: str = "", lines: str = DEFAULT_LINES, no_follow: bool = False, raw: bool = False
) -> int:
    """Follow the newest run's log; --run ID, --lines N|all, --no-follow, --raw. Ctrl-C leaves the run alone."""
    target = _only(c, "tail-log")
    return follow(c, target, run, _lines(lines), follow_on=not no_follow, raw=raw)


def follow(c: TargetContext, target: Target, run: str, lines: int, *, follow_on: bool, raw: bool) -> int:
    """Print a run's log until it has ended, and say how; the exit code is the run's."""
    remote = connect(target)
    status = _status(remote, run)
    cleaner = tail.Cleaner()

    def write(piece: bytes) -> None:
        if raw:
            sys.stdout.buffer.write(piece)
        else:
            sys.stdout.write(cleaner.feed(piece))
        sys.stdout.flush()

    if follow_on and status.live:
        console.remark(f"following run {status.run_id} ({status.state}); Ctrl-C leaves it alone")
    try:
        sink = tail.Sink(write, console.remark)
        end = tail.tail(remote, status.run_id, lines=lines, follow=follow_on, sink=sink)
        sys.stdout.write("" if raw else cleaner.end())
        sys.stdout.flush()
    except KeyboardInterrupt:
        console.remark("")
        console.remark(f"stopped following; run {status.run_id} goes on untouched")
        console.remark(f"  follow again: {_fab(c, target)} tail-log --run {status.run_id}")
        console.remark(f"  stop it:      {_fab(c, target)} stop --run {status.run_id}")
        return INTERRUPTED
    if not follow_on and end.status.live:
        return 0
    console.remark(f"run {end.status.run_id} is {end.status.state}: {end.status.detail}")
    return run_code(end.status)


@verb()
def status(c: TargetContext, run: str = "", json: bool = False) -> int:
    """How the newest run stands; --run ID, --json. Exits 30 when it failed, 31 when it is lost."""

    def ask(target: Target, remote: Remote) -> verbs.Overview:
        return remote.call("status", verbs.StatusRequest(run_id=run), verbs.Overview, deadline=READ_DEADLINE_S)

    def show(target: Target, overview: verbs.Overview) -> int:
        if json:
            console.show_json({"target": target.name, **records.dump(overview)})
        elif len(c.targets) == 1:
            if overview.run is None:
                console.say(f"no run on {target.name} yet")
            else:
                for line in console.describe_run(overview.run):
                    console.say(line)
            console.say(f"current  {overview.release or 'nothing is deployed'}")
            if overview.holder:
                console.say(f"lock     held by {overview.holder.describe()}")
        return run_code(overview.run) if overview.run else 0

    outcomes = _ask_all(c, ask)
    code = _show_all(outcomes, show, as_json=json)
    if len(c.targets) > 1 and not json:
        rows = [_status_row(outcome.target, outcome.result.run) for outcome in outcomes if outcome.result]
        console.table(("target", "state", "run", "step", "loss", "accepted", "tokens/s", "since"), rows)
    return code


@verb()
def runs(c: TargetContext, limit: str = "20", json: bool = False) -> int:
    """List the runs on the target, newest first; --limit N, --json."""
    count = _count("--limit", limit, 1, 10_000)

    def ask(target: Target, remote: Remote) -> verbs.Runs:
        return remote.call("runs", verbs.RunsRequest(count), verbs.Runs, deadline=READ_DEADLINE_S)

    def show(target: Target, found: verbs.Runs) -> int:
        completion.remember(target.name, [run.run_id for run in found.runs])
        if json:
            console.show_json({"target": target.name, **records.dump(found)})
        return 0

    outcomes = _ask_all(c, ask)
    code = _show_all(outcomes, show, as_json=json)
    if not json:
        rows = [_status_row(one.target, run) for one in outcomes if one.result for run in one.result.runs]
        console.table(("target", "state", "run", "step", "loss", "accepted", "tokens/s", "since"), rows)
    return code


@verb()
def stop(c: TargetContext, run: str = "", kill: bool = False, wait: str = "60") -> int:
    """End the run in order: TERM, checkpoint, exit; --kill if it does not, --wait SECONDS, --run ID."""
    seconds = _count("--wait", wait, 1, 3600)

    def one(target: Target, remote: Remote) -> int:
        request = StopRequest(who=who(), run_id=run, kill=kill, wait_s=float(seconds))
        deadline = seconds + STOP_SPARE_S
        done = remote.call(
            "stop", request, StopResult, deadline=deadline, on_progress=lambda text: _say(c, target, text)
        )
        if not done.stopped:
            _say(c, target, "nothing to stop: no run is going")
        elif done.status is not None:
            _say(c, target, f"run {done.status.run_id} is {done.status.state}: {done.status.detail}")
        return 0

    return _each(c, one)


@verb()
def attach(c: TargetContext, run: str = "") -> int:
    """Show the run's terminal (tmux); detach with Ctrl-B d."""
    target = _only(c, "attach")
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise UsageError("attach needs a terminal", hint=f"`{_fab(c, target)} tail-log` works without one")
    remote = connect(target)
    answer = remote.call("attach", verbs.AttachRequest(run), verbs.AttachAnswer, deadline=READ_DEADLINE_S)
    return remote.transport.shell(answer.argv)


@verb()
def gpus(c: TargetContext, json: bool = False) -> int:
    """What the GPUs show, and whether they are known to be idle; --json. Exits 20 when they are not."""

    def show(target: Target, report: verbs.GpuReport) -> int:
        if json:
            console.show_json({"target": target.name, **records.dump(report)})
        else:
            _say(c, target, f"GPUs: {report.status}")
            for line in (*report.lines, *report.notes):
                _say(c, target, f"  {line}")
        return 0 if report.status in ("idle", "no_gpu") else 20

    return _show_all(_ask_all(c, lambda target, remote: launching.gpus(remote, target)), show, as_json=json)


@verb()
def preflight(c: TargetContext, json: bool = False) -> int:
    """Ask the gate's questions without starting anything; --json. Exits 20 or 24 when it would refuse."""

    def show(target: Target, report: GateReport) -> int:
        if json:
            console.show_json({"target": target.name, "open": report.open, **records.dump(report)})
        else:
            for check in report.checks:
                _say(c, target, f"{'ok     ' if check.passed else 'refused'} {check.name}: {check.detail}")
                if not check.passed and check.hint:
                    _say(c, target, f"        next: {check.hint}")
        refused = [check for check in report.checks if not check.passed]
        return 0 if not refused else 24 if refused[0].kind == "EnvironmentUnfit" else 20

    return _show_all(_ask_all(c, lambda target, remote: launching.preflight(remote, target)), show, as_json=json)


@verb()
def releases(c: TargetContext, json: bool = False) -> int:
    """List the releases on the target; --json."""

    def ask(target: Target, remote: Remote) -> verbs.Releases:
        return remote.call("releases", verbs.Nothing(), verbs.Releases, deadline=READ_DEADLINE_S)

    def show(target: Target, found: verbs.Releases) -> int:
        if json:
            console.show_json({"target": target.name, **records.dump(found)})
        return 0

    outcomes = _ask_all(c, ask)
    code = _show_all(outcomes, show, as_json=json)
    if not json:
        rows = [
            (one.target.name, info.release_id, "current" if info.current else "previous" if info.previous else "",
             str(info.files), f"{info.total_bytes:,}", console.moment(info.deployed_at))
            for one in outcomes if one.result for info in one.result.releases
        ]  # fmt: skip
        console.table(("target", "release", "", "files", "bytes", "deployed"), rows)
    return code


@verb()
def rollback(c: TargetContext, to: str = "") -> int:
    """Make the previous release current again; --to ID. A run that is going keeps its own."""

    def one(target: Target, remote: Remote) -> int:
        done = remote.call("rollback", verbs.SelectRequest(to, who()), Deployed, deadline=READ_DEADLINE_S)
        word = "is current now" if done.changed else "is current already"
        _say(c, target, f"release {done.current} {word}; previous is {done.previous or 'none'}")
        return 0

    return _each(c, one)


@verb()
def clear_cache(c: TargetContext) -> int:
    """Remove the compile caches; refused while a run is going."""

    def one(target: Target, remote: Remote) -> int:
        request = verbs.ClearRequest(who(), target.legacy_caches)
        done = remote.call("clear-cache", request, verbs.Cleared, deadline=READ_DEADLINE_S)
        for line in done.lines or ("nothing to clear",):
            _say(c, target, line)
        return 0

    return _each(c, one)


@verb()
def trust(c: TargetContext, fingerprint: str = "", replace: bool = False) -> int:
    """Store the host's key after comparing it; --fingerprint SHA256:..., --replace a key that has changed."""

    def one(target: Target, _remote: Remote) -> int:
        if target.ssh is None:
            raise UsageError(f"{target.name} is this machine: there is no key to trust")
        from dflash_ops import trust as trusting  # Paramiko takes longer to load than a local verb takes to run

        shown = trusting.fetch(target.ssh)
        on_file = trusting.known(target.ssh, shown.name)
        _say(c, target, f"{shown.name} shows {shown.kind} {shown.fingerprint}")
        if trusting.check(shown, on_file, fingerprint, replace=replace):
            _say(c, target, f"it is in {on_file.path} already")
            return 0
        if not fingerprint:
            _confirm(c, target, "Is this what the host's own console shows?")
        trusting.store(shown, on_file.path)
        _say(c, target, f"stored in {on_file.path}")
        return 0

    return _each(c, one)


def run_code(status: RunStatus) -> int:
    """The exit code that tells how a run stands."""
    if status.state == "lost":
        return RunLost.exit_code
    return RunFailed.exit_code if status.state in ("failed", "killed") else 0


@dataclass(frozen=True, slots=True)
class Outcome(Generic[ResultT]):
    """One target's answer, or its error."""

    target: Target
    result: ResultT | None = None
    error: OpsError | None = None


def _ask_all(c: TargetContext, ask: Callable[[Target, Remote], ResultT]) -> list[Outcome[ResultT]]:
    """Ask every target; several at the same time, so that one that hangs holds nobody up."""

    def one(target: Target) -> Outcome[ResultT]:
        try:
            return Outcome(target, result=ask(target, connect(target)))
        except OpsError as error:
            return Outcome(target, error=error)

    if len(c.targets) == 1:
        return [one(c.targets[0])]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, c.targets))


def _show_all(outcomes: list[Outcome[ResultT]], show: Callable[[Target, ResultT], int], *, as_json: bool) -> int:
    """Print every answer and error; the worst code."""
    codes = [0]
    for outcome in outcomes:
        if outcome.result is not None:
            codes.append(show(outcome.target, outcome.result))
        elif outcome.error is not None:
            error = outcome.error
            console.show_error(error, outcome.target.name if len(outcomes) > 1 else "")
            if as_json:
                body = {"kind": type(error).__name__, "code": error.exit_code, "what": error.what, "why": error.why}
                console.show_json({"target": outcome.target.name, "error": body})
            codes.append(error.exit_code)
    return max(codes)


def _each(c: TargetContext, act: Callable[[Target, Remote], int]) -> int:
    """Act on one target after the other; a failure on one does not keep the others from theirs."""
    codes = [0]
    for target in c.targets:
        try:
            codes.append(act(target, connect(target)))
        except OpsError as error:
            console.show_error(error, target.name if len(c.targets) > 1 else "")
            codes.append(error.exit_code)
    return max(codes)


def _status(remote: Remote, run: str) -> RunStatus:
    asked = verbs.StatusRequest(run_id=run)
    found = remote.call("status", asked, verbs.Overview, deadline=READ_DEADLINE_S).run
    if found is None:
        raise UsageError("there is no run on this target yet", hint="`fab deploy launch`")
    return found


def _status_row(target: Target, run: RunStatus | None) -> tuple[str, ...]:
    if run is None:
        return (target.name, "no run", "", "", "", "", "", "")
    latest = run.latest
    return (
        target.name,
        run.state,
        run.run_id,
        str(latest.step) if latest.step is not None else "-",
        console.number(latest.loss),
        console.number(latest.accept_len, 2),
        console.number(latest.context_tokens_per_s, 0),
        console.ago(run.created_at),
    )


def _say(c: TargetContext, target: Target, text: str) -> None:
    console.say(f"[{target.name}] {text}" if len(c.targets) > 1 else text)


def _confirm(c: TargetContext, target: Target, question: str) -> None:
    """Go on only after a typed yes; UsageError where nobody can type."""
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to compare the fingerprint", hint="give it: --fingerprint SHA256:...")
    print(f"{question} Type yes: ", end="", flush=True)
    if sys.stdin.readline().strip().lower() != "yes":
        raise UsageError(f"{target.name}: nothing was stored", hint=f"{_fab(c, target)} trust")


def _only(c: TargetContext, name: str) -> Target:
    if len(c.targets) != 1:
        raise UsageError(f"{name} takes one target", hint="give one name to -H")
    return c.targets[0]


def _fab(c: TargetContext, target: Target) -> str:
    return "fab" if target.name == c.default else f"fab -H {target.name}"


def _lines(word: str) -> int:
    return -1 if word == "all" else _count("--lines", word, 0, 10**9)


def _count(flag: str, word: str, low: int, high: int) -> int:
    if not word.isascii() or not word.isdigit() or not low <= int(word) <= high:
        raise UsageError(f"{flag} {word!r} is not a whole number from {low} to {high}")
    return int(word)


@functools.cache
def who() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"
