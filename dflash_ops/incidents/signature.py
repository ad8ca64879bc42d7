"""The two shapes of the catalogue: an incident, and the signatures that show it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from dflash_ops.incidents.evidence import Source

Weight = Literal[1, 2, 3]


@dataclass(frozen=True, slots=True)
class Signature:
    """A line that shows an incident; with `also`, a second line must be there; with `unless`, none may be.

    Weight 3 names the cause by itself, 2 is strong, 1 is a consequence that other causes share.
    """

    source: Source
    pattern: re.Pattern[str]
    weight: Weight
    also: re.Pattern[str] | None
    unless: re.Pattern[str] | None


@dataclass(frozen=True, slots=True)
class Incident:
    """One thing that goes wrong. `next_command` is always safe to run; RUN stands for the run's id."""

    name: str
    cause: str
    signatures: tuple[Signature, ...]
    runbook: str
    next_command: str
    retryable: bool
    """May the supervisor start the run again by itself? Not where it would fail the same way."""
    fatal: bool = True
    """Does it end the trainer? Then log lines count only if the trainer did not go on after them."""
    explains: tuple[str, ...] = ()
    """Incidents that are mere consequences of this one: when both match, this one is the answer."""


def raised(*kinds: str, weight: Weight = 2) -> Signature:
    """A signature: this tool itself raised an error of one of these classes (see `dflash_ops.errors`)."""
    return seen(Source.FAILURE, rf"^kind: (?:{'|'.join(kinds)})$", weight=weight)


def seen(
    source: Source, *patterns: str, weight: Weight = 2, also: str | None = None, unless: str | None = None
) -> Signature:
    """A signature: any of `patterns`, in any case, on one line of `source`."""
    return Signature(
        source,
        re.compile("|".join(patterns), re.IGNORECASE),
        weight,
        re.compile(also, re.IGNORECASE) if also else None,
        re.compile(unless, re.IGNORECASE) if unless else None,
    )
