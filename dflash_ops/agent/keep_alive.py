"""May a run that crashed start again by itself? Pure: facts of its attempts in, a decision out.

A restart has to be able to help. It is bounded, it stops where attempts no longer get further (a crash loop), and it
never follows an incident that would only repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_ops.agent.runs import ExitRecord
from dflash_ops.incidents import Diagnosis, NoMatch

FIRST_WAIT_S = 2.0
LONGEST_WAIT_S = 120.0
LOOP_ATTEMPTS = 2
"""This many crashes in a row without a newer checkpoint are a loop."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One life of the trainer. `saved` is the newest checkpoint's step after it; -1: none."""

    end: ExitRecord
    saved: int


@dataclass(frozen=True, slots=True)
class Decision:
    """`again`: start the next attempt after `wait_s` seconds. `reason` goes into the log either way."""

    again: bool
    reason: str
    wait_s: float = 0.0


def decide(limit: int, attempts: Sequence[Attempt], verdict: Diagnosis | NoMatch, *, stopping: bool) -> Decision:
    """What follows the last of `attempts`. `limit` is how many restarts the operator allows."""
    end = attempts[-1].end
    if end.code == 0:
        return Decision(again=False, reason="it ended in order")
    if stopping or end.forwarded:
        return Decision(again=False, reason="it was told to stop")
    if limit <= 0:
        return Decision(again=False, reason="no restart was asked for (--keep-alive)")
    if isinstance(verdict, Diagnosis) and not verdict.incident.retryable:
        return Decision(again=False, reason=f"{verdict.incident.name} would only repeat: {verdict.incident.cause}")
    if len(attempts) > limit:
        return Decision(again=False, reason=f"all {limit} restarts are used up")
    recent = [attempt.saved for attempt in attempts[-LOOP_ATTEMPTS - 1 :]]
    if len(attempts) > LOOP_ATTEMPTS and max(recent[1:]) <= recent[0]:
        return Decision(again=False, reason=f"a crash loop: {LOOP_ATTEMPTS} restarts got no further than the first")
    wait = min(FIRST_WAIT_S * 2 ** (len(attempts) - 1), LONGEST_WAIT_S)
    cause = verdict.incident.name if isinstance(verdict, Diagnosis) else "an unknown cause"
    return Decision(again=True, reason=f"restart {len(attempts)} of {limit} after {cause}", wait_s=wait)


def with_resume(argv: Sequence[str]) -> tuple[str, ...]:
    """The trainer's command line, going on from the newest intact checkpoint of its own run.

    >>> with_resume(["python", "--set", "run.resume=/old", "--set", "a=1"])
    ('python', '--set', 'a=1', '--set', 'run.resume=auto')
    """
    words: list[str] = []
    for word in argv:
        if word.startswith("run.resume=") and words and words[-1] == "--set":
            words.pop()
            continue
        words.append(word)
    return (*words, "--set", "run.resume=auto")
