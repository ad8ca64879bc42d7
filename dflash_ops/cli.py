"""What every verb of `fab` shares: its targets, its errors, its words.

A verb takes its targets from -H (`executor`), turns each foreseeable failure into lines and an exit code (`verb`), and
is run once per command line entry, in order: `fab deploy launch` is two calls.
"""

from __future__ import annotations

import atexit
import functools
import getpass
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fabric import task
from invoke.collection import Collection
from invoke.exceptions import Exit

from dflash_ops import console
from dflash_ops.agent.runs import RunStatus
from dflash_ops.connect import close_all, connect
from dflash_ops.errors import INTERRUPTED, OpsError, RunFailed, RunLost, UsageError
from dflash_ops.executor import TargetContext
from dflash_ops.remote import Remote
from dflash_ops.settings import Target

AT_ONCE = 6
"""Targets asked at the same time."""
READ_DEADLINE_S = 60.0

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


def ask_all(c: TargetContext, ask: Callable[[Target, Remote], ResultT]) -> list[Outcome[ResultT]]:
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


def show_all(outcomes: list[Outcome[ResultT]], show: Callable[[Target, ResultT], int], *, as_json: bool) -> int:
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


def each(c: TargetContext, act: Callable[[Target, Remote], int]) -> int:
    """Act on one target after the other; a failure on one does not keep the others from theirs."""
    codes = [0]
    for target in c.targets:
        try:
            codes.append(act(target, connect(target)))
        except OpsError as error:
            console.show_error(error, target.name if len(c.targets) > 1 else "")
            codes.append(error.exit_code)
    return max(codes)


def say(c: TargetContext, target: Target, text: str) -> None:
    console.say(f"[{target.name}] {text}" if len(c.targets) > 1 else text)


def only(c: TargetContext, name: str) -> Target:
    if len(c.targets) != 1:
        raise UsageError(f"{name} takes one target", hint="give one name to -H")
    return c.targets[0]


def fab_words(c: TargetContext, target: Target) -> str:
    return "fab" if target.name == c.default else f"fab -H {target.name}"


def whole_number(flag: str, word: str, low: int, high: int) -> int:
    if not word.isascii() or not word.isdigit() or not low <= int(word) <= high:
        raise UsageError(f"{flag} {word!r} is not a whole number from {low} to {high}")
    return int(word)


@functools.cache
def operator() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"
