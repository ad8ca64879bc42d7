"""`fab -H NAME[,NAME]`: names from hosts.yaml, through Fabric's own hook for it (`Executor.normalize_hosts`).

A verb is called once with all its targets, not once per target: so it can print one table and end with the code of
the worst.
"""

from __future__ import annotations

from typing import Any

from fabric import Executor
from invoke.config import Config
from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import Call

from dflash_ops import hosts
from dflash_ops.errors import OpsError
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
