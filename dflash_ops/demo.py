"""`make demo`: the main job on this machine, from deploy to a trained drafter, with the log live."""

from __future__ import annotations

import sys
from typing import Any

from dflash_ops import cli, console, hosts, launch, release, tail
from dflash_ops.agent.runs import RunStatus
from dflash_ops.connect import connect
from dflash_ops.errors import LockHeld, UsageError

TARGET = "local"
VARIANT = "threadwarm"


def main() -> int:
    """Deploy, launch, follow, sum up; the exit code of whatever failed, else 0."""
    return cli.guarded(_demo)


def _demo() -> int:
    known = hosts.load()
    if TARGET not in known.targets:
        raise UsageError(
            f"the demo needs a target called {TARGET!r}", hint="restore hosts.yaml as it is in the repository"
        )
    target = known.targets[TARGET]
    remote = connect(target)
    try:
        console.say("$ fab deploy")
        deployed = release.deploy(
            remote, release.collect(hosts.checkout()), cli.operator(), console.say, console.upload
        )
        console.say(f"release {deployed.release_id}: {deployed.files} files, {deployed.sent:,} bytes sent")
        console.say(f"$ fab launch --variant {VARIANT}")
        started = launch.launch(remote, target, launch.LaunchOptions(variant=VARIANT), cli.operator(), console.say)
    except LockHeld as error:
        console.show_error(error)
        console.remark("a run is already going: `fab tail-log` follows it, `fab stop` ends it, then `make demo` again")
        return error.exit_code
    console.say(f"run {started.run_id} goes on by itself now, pid {started.pid}, under {started.launcher}")
    console.say("$ fab tail-log")
    cleaner = tail.Cleaner()

    def write(piece: bytes) -> None:
        sys.stdout.write(cleaner.feed(piece))
        sys.stdout.flush()

    try:
        end = tail.tail(remote, started.run_id, lines=-1, follow=True, sink=tail.Sink(write, console.remark))
    except KeyboardInterrupt:
        console.remark(
            f"stopped following; run {started.run_id} goes on. `fab tail-log` follows it, `fab stop` ends it"
        )
        raise
    print(cleaner.end(), flush=True)
    _sum_up(end.status)
    return cli.run_code(end.status)


def _sum_up(status: RunStatus) -> None:
    said = status.latest.end or {}
    summary: dict[str, Any] = said.get("summary") or {}
    console.say(f"run {status.run_id} is {status.state}: {status.detail}")
    rows = [
        ("steps", console.number(summary.get("steps"), 0)),
        ("speed", f"{console.number(summary.get('context_tokens_per_s'), 0)} context tokens/s"),
        ("loss", _change(summary, "loss", 4)),
        ("held-out acceptance length", _change(summary, "accept_len", 3)),
        ("checkpoint", str(summary.get("checkpoint") or status.latest.checkpoint or "none")),
        ("log", status.log),
    ]
    for name, value in rows:
        console.say(f"  {name:<28}{value}")
    console.say("next:")
    for command, purpose in (
        ("fab status", "how the run stands"),
        ("fab runs", "every run on this target"),
        ("fab launch --resume auto --set run.max_steps=N", "train on from the checkpoint"),
        ("fab deploy launch --variant sdpa", "the same without compilation"),
        ("fab --list", "every verb"),
    ):
        console.say(f"  .venv/bin/{command:<48}# {purpose}")


def _change(summary: dict[str, Any], name: str, digits: int) -> str:
    first, last = summary.get(f"{name}_first"), summary.get(f"{name}_last")
    text = f"{console.number(first, digits)} -> {console.number(last, digits)}"
    return text + (f"  ({last / first:.2f} x)" if name == "accept_len" and first and last else "")


if __name__ == "__main__":
    sys.exit(main())
