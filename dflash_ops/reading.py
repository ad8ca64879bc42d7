"""The verbs that only look: what runs, what is there, the log. Thin, like `tasks`."""

from __future__ import annotations

import sys

from dflash_ops import completion, console, tail
from dflash_ops import launch as launching
from dflash_ops.agent import messages, records
from dflash_ops.agent.gate import GateReport
from dflash_ops.agent.runs import RunStatus
from dflash_ops.cli import READ_DEADLINE_S, ask_all, fab_words, only, run_code, say, show_all, verb, whole_number
from dflash_ops.connect import connect
from dflash_ops.errors import INTERRUPTED, UsageError
from dflash_ops.executor import TargetContext
from dflash_ops.remote import Remote
from dflash_ops.settings import Target

DEFAULT_LINES = "100"


@verb()
def tail_log(
    c: TargetContext, run: str = "", lines: str = DEFAULT_LINES, no_follow: bool = False, raw: bool = False
) -> int:
    """Follow the newest run's log; --run ID, --lines N|all, --no-follow, --raw. Ctrl-C leaves the run alone."""
    target = only(c, "tail-log")
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
        console.remark(f"  follow again: {fab_words(c, target)} tail-log --run {status.run_id}")
        console.remark(f"  stop it:      {fab_words(c, target)} stop --run {status.run_id}")
        return INTERRUPTED
    if not follow_on and end.status.live:
        return 0
    console.remark(f"run {end.status.run_id} is {end.status.state}: {end.status.detail}")
    return run_code(end.status)


@verb()
def status(c: TargetContext, run: str = "", json: bool = False) -> int:
    """How the newest run stands; --run ID, --json. Exits 30 when it failed, 31 when it is lost."""

    def ask(target: Target, remote: Remote) -> messages.Overview:
        return remote.call("status", messages.StatusRequest(run_id=run), messages.Overview, deadline=READ_DEADLINE_S)

    def show(target: Target, overview: messages.Overview) -> int:
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

    outcomes = ask_all(c, ask)
    code = show_all(outcomes, show, as_json=json)
    if len(c.targets) > 1 and not json:
        rows = [_status_row(outcome.target, outcome.result.run) for outcome in outcomes if outcome.result]
        console.table(("target", "state", "run", "step", "loss", "accepted", "tokens/s", "since"), rows)
    return code


@verb()
def runs(c: TargetContext, limit: str = "20", json: bool = False) -> int:
    """List the runs on the target, newest first; --limit N, --json."""
    count = whole_number("--limit", limit, 1, 10_000)

    def ask(target: Target, remote: Remote) -> messages.Runs:
        return remote.call("runs", messages.RunsRequest(count), messages.Runs, deadline=READ_DEADLINE_S)

    def show(target: Target, found: messages.Runs) -> int:
        completion.remember(target.name, [run.run_id for run in found.runs])
        if json:
            console.show_json({"target": target.name, **records.dump(found)})
        return 0

    outcomes = ask_all(c, ask)
    code = show_all(outcomes, show, as_json=json)
    if not json:
        rows = [_status_row(one.target, run) for one in outcomes if one.result for run in one.result.runs]
        console.table(("target", "state", "run", "step", "loss", "accepted", "tokens/s", "since"), rows)
    return code


@verb()
def attach(c: TargetContext, run: str = "") -> int:
    """Show the run's terminal (tmux); detach with Ctrl-B d."""
    target = only(c, "attach")
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise UsageError("attach needs a terminal", hint=f"`{fab_words(c, target)} tail-log` works without one")
    remote = connect(target)
    answer = remote.call("attach", messages.AttachRequest(run), messages.AttachAnswer, deadline=READ_DEADLINE_S)
    return remote.transport.shell(answer.argv)


@verb()
def gpus(c: TargetContext, json: bool = False) -> int:
    """What the GPUs show, and whether they are known to be idle; --json. Exits 20 when they are not."""

    def show(target: Target, report: messages.GpuReport) -> int:
        if json:
            console.show_json({"target": target.name, **records.dump(report)})
        else:
            say(c, target, f"GPUs: {report.status}")
            for line in (*report.lines, *report.notes):
                say(c, target, f"  {line}")
        return 0 if report.status in ("idle", "no_gpu") else 20

    return show_all(ask_all(c, lambda target, remote: launching.gpus(remote, target)), show, as_json=json)


@verb()
def preflight(c: TargetContext, json: bool = False) -> int:
    """Ask the gate's questions without starting anything; --json. Exits 20 or 24 when it would refuse."""

    def show(target: Target, report: GateReport) -> int:
        if json:
            console.show_json({"target": target.name, "open": report.open, **records.dump(report)})
        else:
            for check in report.checks:
                say(c, target, f"{'ok     ' if check.passed else 'refused'} {check.name}: {check.detail}")
                if not check.passed and check.hint:
                    say(c, target, f"        next: {check.hint}")
        refused = [check for check in report.checks if not check.passed]
        return 0 if not refused else 24 if refused[0].kind == "EnvironmentUnfit" else 20

    return show_all(ask_all(c, lambda target, remote: launching.preflight(remote, target)), show, as_json=json)


@verb()
def releases(c: TargetContext, json: bool = False) -> int:
    """List the releases on the target; --json."""

    def ask(target: Target, remote: Remote) -> messages.Releases:
        return remote.call("releases", messages.Nothing(), messages.Releases, deadline=READ_DEADLINE_S)

    def show(target: Target, found: messages.Releases) -> int:
        if json:
            console.show_json({"target": target.name, **records.dump(found)})
        return 0

    outcomes = ask_all(c, ask)
    code = show_all(outcomes, show, as_json=json)
    if not json:
        rows = [
            (one.target.name, info.release_id, "current" if info.current else "previous" if info.previous else "",
             str(info.files), f"{info.total_bytes:,}", console.moment(info.deployed_at))
            for one in outcomes if one.result for info in one.result.releases
        ]  # fmt: skip
        console.table(("target", "release", "", "files", "bytes", "deployed"), rows)
    return code


def _status(remote: Remote, run: str) -> RunStatus:
    asked = messages.StatusRequest(run_id=run)
    found = remote.call("status", asked, messages.Overview, deadline=READ_DEADLINE_S).run
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


def _lines(word: str) -> int:
    return -1 if word == "all" else whole_number("--lines", word, 0, 10**9)
