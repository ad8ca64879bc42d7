"""The verbs that change a target: parse, call, print. What they do is in the modules that they call; what they
share is in `cli`. The verbs that only look are in `reading`, those for living with a run in `care`.
"""

from __future__ import annotations

import json as jsonlib
import sys

from dflash_ops import completion, console, hosts, release
from dflash_ops import launch as launching
from dflash_ops.agent import messages
from dflash_ops.agent.releases import Deployed
from dflash_ops.agent.stop import StopRequest, StopResult
from dflash_ops.cli import READ_DEADLINE_S, each, fab_words, operator, say, verb, whole_number
from dflash_ops.errors import UsageError
from dflash_ops.executor import TargetContext
from dflash_ops.remote import Remote
from dflash_ops.settings import Target

STOP_SPARE_S = 60.0
"""What `stop` may take beyond its --wait: KILL, and the supervisor's last words."""


@verb()
def deploy(c: TargetContext, dry_run: bool = False) -> int:
    """Ship trainer/ to the target; an unchanged tree moves nothing. --dry-run shows what would happen."""
    shipped = release.collect(hosts.checkout())

    def show(target: Target, remote: Remote) -> int:
        plan = release.plan(remote, shipped)
        say(c, target, f"release {plan.release_id}; current is {plan.current or 'none'}")
        for line in plan.changes or ("no file differs",):
            say(c, target, f"  {line}")
        say(c, target, f"{plan.sends:,} bytes would be sent; these would run:")
        for argv in plan.commands:
            say(c, target, f"  {jsonlib.dumps(argv, ensure_ascii=False)}")
        return 0

    def one(target: Target, remote: Remote) -> int:
        done = release.deploy(remote, shipped, operator(), lambda text: say(c, target, text), console.upload)
        if done.sent:
            text = f"release {done.release_id} is deployed: {done.files} files, {done.sent:,} bytes sent"
        elif done.result.changed:
            text = f"release {done.release_id} was there already: nothing sent, now current"
        else:
            text = f"release {done.release_id} is unchanged: nothing sent"
        say(c, target, text)
        return 0

    return each(c, show if dry_run else one)


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
    restarts = whole_number("--keep-alive", keep_alive, 0, 100)
    options = launching.LaunchOptions(variant, tuple(set or ()), resume, keep_cache, restarts, launcher)

    def one(target: Target, remote: Remote) -> int:
        try:
            done = launching.launch(remote, target, options, operator(), lambda text: say(c, target, text))
        except KeyboardInterrupt:
            console.remark(f"the target may go on with the launch: `{fab_words(c, target)} status` tells")
            raise
        completion.remember(target.name, [done.run_id])
        say(c, target, f"run {done.run_id} is started: release {done.release}, {done.launcher}, pid {done.pid}")
        if done.resumed_from:
            say(c, target, f"goes on from {done.resumed_from}")
        say(c, target, f"log {done.log}")
        say(c, target, f"follow it: {fab_words(c, target)} tail-log")
        return 0

    return each(c, one)


@verb()
def stop(c: TargetContext, run: str = "", kill: bool = False, wait: str = "60") -> int:
    """End the run in order: TERM, checkpoint, exit; --kill if it does not, --wait SECONDS, --run ID."""
    seconds = whole_number("--wait", wait, 1, 3600)

    def one(target: Target, remote: Remote) -> int:
        request = StopRequest(who=operator(), run_id=run, kill=kill, wait_s=float(seconds))
        deadline = seconds + STOP_SPARE_S
        done = remote.call(
            "stop", request, StopResult, deadline=deadline, on_progress=lambda text: say(c, target, text)
        )
        if not done.stopped:
            say(c, target, "nothing to stop: no run is going")
        elif done.status is not None:
            say(c, target, f"run {done.status.run_id} is {done.status.state}: {done.status.detail}")
        return 0

    return each(c, one)


@verb()
def rollback(c: TargetContext, to: str = "") -> int:
    """Make the previous release current again; --to ID. A run that is going keeps its own."""

    def one(target: Target, remote: Remote) -> int:
        done = remote.call("rollback", messages.SelectRequest(to, operator()), Deployed, deadline=READ_DEADLINE_S)
        word = "is current now" if done.changed else "is current already"
        say(c, target, f"release {done.current} {word}; previous is {done.previous or 'none'}")
        return 0

    return each(c, one)


@verb()
def clear_cache(c: TargetContext) -> int:
    """Remove the compile caches; refused while a run is going."""

    def one(target: Target, remote: Remote) -> int:
        request = messages.ClearRequest(operator(), target.legacy_caches)
        done = remote.call("clear-cache", request, messages.Cleared, deadline=READ_DEADLINE_S)
        for line in done.lines or ("nothing to clear",):
            say(c, target, line)
        return 0

    return each(c, one)


@verb()
def trust(c: TargetContext, fingerprint: str = "", replace: bool = False) -> int:
    """Store the host's key after comparing it; --fingerprint SHA256:..., --replace a key that has changed."""

    def one(target: Target, _remote: Remote) -> int:
        if target.ssh is None:
            raise UsageError(f"{target.name} is this machine: there is no key to trust")
        from dflash_ops import trust as trusting  # Paramiko takes longer to load than a local verb takes to run

        shown = trusting.fetch(target.ssh)
        on_file = trusting.known(target.ssh, shown.name)
        say(c, target, f"{shown.name} shows {shown.kind} {shown.fingerprint}")
        if trusting.check(shown, on_file, fingerprint, replace=replace):
            say(c, target, f"it is in {on_file.path} already")
            return 0
        if not fingerprint:
            _confirm(c, target, "Is this what the host's own console shows?")
        trusting.store(shown, on_file.path)
        say(c, target, f"stored in {on_file.path}")
        return 0

    return each(c, one)


def _confirm(c: TargetContext, target: Target, question: str) -> None:
    """Go on only after a typed yes; UsageError where nobody can type."""
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to compare the fingerprint", hint="give it: --fingerprint SHA256:...")
    print(f"{question} Type yes: ", end="", flush=True)
    if sys.stdin.readline().strip().lower() != "yes":
        raise UsageError(f"{target.name}: nothing was stored", hint=f"{fab_words(c, target)} trust")
