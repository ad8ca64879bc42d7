"""The state of a run, from facts: pure, one function, each state with the sentence that proves it.

    starting ─▶ warming ─▶ training ⇄ stalled
                              │
                              ▼
                          finishing ─▶ finished (0) | failed (an error) | killed (a signal)
    from anywhere ─▶ lost: nobody wrote down how it ended

An exit record is the strongest fact, then the boot id, then the process table, then metrics.jsonl. All times are
by the target's clock, so a laptop whose clock is off sees the same state.
"""

from __future__ import annotations

import itertools
import signal as signals
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dflash_ops.events import Event


class State(StrEnum):
    """Where a run stands."""

    STARTING = "starting"
    WARMING = "warming"
    TRAINING = "training"
    STALLED = "stalled"
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    LOST = "lost"

    @property
    def live(self) -> bool:
        """Is a trainer at work?"""
        return self in (State.STARTING, State.WARMING, State.TRAINING, State.STALLED, State.FINISHING)


@dataclass(frozen=True, slots=True)
class ExitFacts:
    """exit.json: how the supervisor saw the trainer end. `oom_kills` counts the cgroup's kills during the run."""

    exit_code: int | None
    signal: int | None = None
    oom_kills: int = 0


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known of one run. None stands for unknown everywhere, and unknown is never taken for dead."""

    now: float
    started: float
    launch_boot_id: str | None = None
    boot_id: str | None = None
    container_uptime_s: float | None = None
    process_alive: bool | None = None
    exit: ExitFacts | None = None
    stop_requested: bool = False
    oom_kills: int | None = None
    """memory.events oom_kill now, less its value at launch."""


@dataclass(frozen=True, slots=True)
class StallPolicy:
    """Stalled: no sign of work for `factor` times the median interval between step events, at least `floor_s`."""

    factor: float = 8.0
    floor_s: float = 60.0
    warmup_deadline_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Health:
    """A state and the sentence that proves it; `str` is the line that `fab status` shows."""

    state: State
    evidence: str

    def __str__(self) -> str:
        return f"{self.state} ({self.evidence})"


def assess(facts: RunFacts, events: Sequence[Event], policy: StallPolicy | None = None) -> Health:
    """The state of a run. `events` is the tail of its metrics.jsonl, of the newest attempt."""
    if facts.exit is not None:
        return _ended(facts.exit, events)
    if (restart := _restart(facts)) is not None:
        return Health(State.LOST, restart)
    if facts.process_alive is False:
        if facts.oom_kills:
            return Health(State.LOST, f"out of memory: the kernel killed {facts.oom_kills} process(es), no exit record")
        return Health(State.LOST, "the process is gone and no exit record was written")
    if facts.stop_requested:
        return Health(State.FINISHING, "it was told to stop")
    return _living(facts, events, policy or StallPolicy())


def _ended(end: ExitFacts, events: Sequence[Event]) -> Health:
    if end.signal:
        because = ", out of memory" if end.oom_kills else ""
        return Health(State.KILLED, f"{_signal_name(end.signal)}{because}")
    if end.exit_code == 0:
        reason = next((e.values.get("reason") for e in reversed(events) if e.kind == "end"), None)
        return Health(State.FINISHED, str(reason) if reason else "exit code 0")
    if end.exit_code is None:
        return Health(State.LOST, "the exit record holds neither an exit code nor a signal")
    because = f", {end.oom_kills} out-of-memory kill(s) during the run" if end.oom_kills else ""
    return Health(State.FAILED, f"exit code {end.exit_code}{because}")


def _restart(facts: RunFacts) -> str | None:
    age = facts.now - facts.started
    if facts.container_uptime_s is not None and facts.container_uptime_s + 1 < age:
        # A container shares its host's boot id: uptime alone tells a container's restart.
        where = "host" if _boot_changed(facts) else "container"
        return f"{where} restarted: up for {facts.container_uptime_s:.0f} s, the run began {age:.0f} s ago"
    if _boot_changed(facts):
        return f"host restarted: boot id {_short(facts.launch_boot_id)} at launch, {_short(facts.boot_id)} now"
    return None


def _boot_changed(facts: RunFacts) -> bool:
    return bool(facts.launch_boot_id and facts.boot_id and facts.launch_boot_id != facts.boot_id)


def _living(facts: RunFacts, events: Sequence[Event], policy: StallPolicy) -> Health:
    kinds = {event.kind for event in events}
    if "end" in kinds:
        reason = next(e.values.get("reason") for e in reversed(events) if e.kind == "end")
        return Health(State.FINISHING, f"the last event is the end: {reason}")
    steps = [event for event in events if event.kind == "step"]
    if steps:
        return _stepping(facts, events, steps, policy)
    age = facts.now - facts.started
    if "gate_open" in kinds:
        quiet = facts.now - events[-1].time
        if quiet > policy.warmup_deadline_s:
            return Health(State.STALLED, f"the gate is open and no step came for {_span(quiet)}")
        return Health(State.TRAINING, "the gate is open, the first step is under way")
    if kinds & {"start", "warmup"}:
        warm = sum(1 for event in events if event.kind == "warmup")
        quiet = facts.now - events[-1].time
        if quiet > policy.warmup_deadline_s:
            return Health(State.STALLED, f"warm-up shows no progress for {_span(quiet)}")
        return Health(State.WARMING, f"{warm} warm-up event(s), the gate is closed, {_span(age)} since launch")
    if age > policy.warmup_deadline_s:
        return Health(State.STALLED, f"no event for {_span(age)} since launch")
    return Health(State.STARTING, f"no event yet, {_span(age)} since launch")


def _stepping(facts: RunFacts, events: Sequence[Event], steps: list[Event], policy: StallPolicy) -> Health:
    quiet = max(facts.now - max(event.time for event in events), 0.0)
    typical = step_interval(steps)
    limit = max(policy.floor_s, policy.factor * typical) if typical is not None else policy.warmup_deadline_s
    step = f"step {steps[-1].step}, {_span(quiet)} ago"
    if quiet > limit:
        usual = f"; usually every {_span(typical)}" if typical is not None else ""
        return Health(State.STALLED, f"{step}{usual}")
    return Health(State.TRAINING, step)


def step_interval(steps: Sequence[Event]) -> float | None:
    """Median seconds between step events; None for fewer than three."""
    times = [event.time for event in steps]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times) if later >= earlier]
    return statistics.median(gaps) if len(gaps) >= 2 else None


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _short(boot_id: str | None) -> str:
    return (boot_id or "?")[:8]


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
