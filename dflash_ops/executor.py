"""`fab -H NAME[,NAME]`: names from hosts.yaml, through Fabric's own hook for it (`Executor.normalize_hosts`).

A verb is called once with all its targets, not once per target: so it can print one table and end with the code of
the worst.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable
from typing import Any

from fabric import Executor
from invoke.config import Config
from invoke.context import Context
from invoke.exceptions import Exit, ParseError
from invoke.tasks import Call

from dflash_ops import hosts
from dflash_ops.errors import OpsError, UsageError
from dflash_ops.settings import Target


class TargetContext(Context):
    """What a verb gets: an Invoke context that knows its targets."""

    targets: tuple[Target, ...]
    default: str
    """The target that is meant without -H: hints need not name it."""

    def __init__(self, config: Config, targets: tuple[Target, ...], default: str) -> None:
        super().__init__(config)
        # Context keeps unknown attributes in its configuration; `_set` is its way to have real ones.
        self._set(targets=targets, default=default)


class TargetCall(Call):
    """A verb with its targets bound."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.bound: dict[str, Any] = kwargs.pop("bound")
        super().__init__(*args, **kwargs)

    def clone_kwargs(self) -> dict[str, Any]:
        return {**super().clone_kwargs(), "bound": self.bound}  # type: ignore[misc]  # untyped in Invoke

    def make_context(self, config: Config) -> TargetContext:
        return TargetContext(config, **self.bound)


class TargetExecutor(Executor):  # type: ignore[misc]  # Fabric publishes no types
    """Fabric's executor with hosts.yaml behind -H."""

    def normalize_hosts(self, names: Any) -> list[dict[str, Any]]:
        """All targets asked for, or the default one, as a single set: one call of the verb."""
        try:
            if self.core[0].args.hosts.value is not None and not any(name.strip() for name in names or []):
                raise UsageError("-H names no target", why="an empty variable?", hint="leave -H out for the default")
            known = hosts.load()
            chosen = hosts.select(known, [name.strip() for name in names or [] if name.strip()])
        except OpsError as error:
            raise Exit("\n".join(error.lines()), code=error.exit_code) from None
        return [{"targets": tuple(chosen), "default": known.default}]

    def expand_calls(self, calls: Any, apply_hosts: bool = True) -> Any:
        if self.core.remainder:
            raise Exit(
                "error: a bare command after -- is not run: it would run on the host, not in the container", code=2
            )
        return super().expand_calls(calls, apply_hosts)

    def parameterize(self, call: Any, bound: dict[str, Any]) -> Any:
        return call.clone(into=TargetCall, with_={"bound": bound})


def usage_exits_2(program: Any) -> None:
    """Make a verb or flag that does not exist end with 2, like every other wrong use; Invoke's own code for it is 1.

    `program` is Fabric's: it parses the verbs only after it has loaded our namespace, so its parser can still be told.
    What it parses before that (its own flags: -H without a value) keeps Invoke's words and code 1.
    """

    def told(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                step()
            except ParseError as error:
                raise Exit("\n".join(_wrong_words(program, str(error)).lines()), code=UsageError.exit_code) from None

        return run

    parse = program.parse_tasks

    def parse_tasks() -> None:
        parse()
        _refuse_empty_lists(program)

    program.parse_tasks = told(parse_tasks)
    program.parse_cleanup = told(program.parse_cleanup)  # looks up the verb of --help


def _refuse_empty_lists(program: Any) -> None:
    """A flag that may be repeated (--set) needs its value too; Invoke would drop it and launch without the setting."""
    flags = {flag for task in program.tasks for flag, argument in task.flags.items() if argument.kind is list}
    for word, following in itertools.pairwise([*program.core.unparsed, "-"]):
        if word in flags and following.startswith("-"):
            raise ParseError(f"{word} needs a value")


def _wrong_words(program: Any, said: str) -> UsageError:
    """Invoke's words made plain, with the verb that was probably meant."""
    if (found := re.match(r"Flag <Argument: (\S+).*> needed value", said)) is not None:
        said = f"--{found[1].replace('_', '-')} needs a value"
    elif (found := re.match(r"'(\S+)' did not receive required positional arguments: (.+)", said)) is not None:
        hint = f"`fab --help {found[1]}` says what goes there, `fab --list` shows the verbs"
        return UsageError(f"{found[1]} needs {found[2]}", hint=hint)
    elif (found := re.match(r"No idea what '(.+)' is!", said)) is not None:
        word = found[1]
        near = difflib.get_close_matches(word, program.collection.task_names, n=1)
        said = f"no flag {word}" if word.startswith("-") else f"no verb {word!r}"
        said += f", did you mean {near[0]!r}?" if near else ""
    return UsageError(said.strip(), hint="`fab --list` shows the verbs, `fab --help VERB` its flags")
