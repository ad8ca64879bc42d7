"""The state of a run, from facts: pure, one function, each state with the sentence that proves it.

    starting ─▶ warming ─▶ training ⇄ stalled
                              │
                              ▼
                          finishing ─▶ finished (0) | failed (an error) | killed (a signal)
    from anywhere ─▶ lost: nobody wrote down how it ended

An exit record is the strongest fact, then the boot id, then the process table, then metrics.jsonl. Nothing on disk
can claim that a dead run is running. All times are by the target's clock, so a laptop whose clock is off sees the
same state. Standard library only: the target's agent uses this module too.
"""

from __future__ import annotations

import itertools
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
    """How the supervisor saw the trainer end. `oom_kills` counts the kernel's kills for memory during the run."""

    code: int | None
    signal: str | None = None
    oom_kills: int | None = None
    stopped: bool = False
    """A signal to stop was passed on to the trainer before its end."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known of one run, besides its metrics. A process that has not been started yet is None, not dead."""

    now: float
    created: float
    launch_boot: str
    boot: str
    """Kernel boot id, a slash, and what tells one start of the container from the next."""
    launcher_alive: bool = False
    supervisor_alive: bool | None = None
    trainer_alive: bool | None = None
    trainer_pid: int | None = None
    exit: ExitFacts | None = None
    stop_requested: bool = False
    restarting: int | None = None
    """The attempt that has crashed, while its supervisor waits to start the next one."""
    oom_kills: int | None = None
    """The kernel's kills for memory since launch, where that can be read."""


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


STOP_SIGNALS = ("SIGTERM", "SIGHUP")
LAUNCH_GRACE_S = 60.0
"""How long a run without any process may count as starting: the launcher hands over within this."""


def assess(facts: RunFacts, events: Sequence[Event], policy: StallPolicy | None = None) -> Health:
    """The state of a run. `events` is the tail of its metrics.jsonl, of the newest attempt."""
    if facts.exit is not None:
        return _ended(facts.exit, events)
    if (gone := _vanished(facts)) is not None:
        return Health(State.LOST, gone)
    if facts.supervisor_alive is None:
        return Health(State.STARTING, "the launcher is handing over")
    if facts.restarting is not None and not facts.trainer_alive:
        return Health(State.STARTING, f"attempt {facts.restarting} crashed, the next one is about to begin")
    if not facts.trainer_alive and not events:
        return Health(State.STARTING, "the supervisor is starting the trainer")
    if facts.trainer_alive is False:
        return Health(State.FINISHING, "the trainer has ended, its supervisor is writing the record")
    if facts.stop_requested:
        return Health(State.FINISHING, "it was told to stop")
    return _living(facts, events, policy or StallPolicy())


def _ended(end: ExitFacts, events: Sequence[Event]) -> Health:
    for_memory = f"; the kernel killed {end.oom_kills} process(es) here for memory" if end.oom_kills else ""
    if end.stopped and end.signal in STOP_SIGNALS:
        # Only a trainer that is still starting up has no handler yet: the signal to stop simply ends it.
        return Health(State.FINISHED, f"stopped on request ({end.signal}) while it was starting up")
    if end.signal is not None:
        return Health(State.KILLED, f"ended by {end.signal}{for_memory}")
    if end.code is None and end.reason:
        return Health(State.FAILED, end.reason)
    if end.code is None:
        return Health(State.LOST, "the exit record holds neither an exit code nor a signal")
    said = next((event for event in reversed(events) if event.kind == "end"), None)
    reason = str(said.values.get("reason") or "") if said else ""
    if end.code == 0:
        return Health(State.FINISHED, "stopped on request" if end.stopped else reason or "exit code 0")
    return Health(State.FAILED, (end.reason or f"exit code {end.code}{f' ({reason})' if reason else ''}") + for_memory)


def _vanished(facts: RunFacts) -> str | None:
    age = facts.now - facts.created
    if facts.launch_boot != facts.boot:
        kernel_then, kernel_now = (boot.partition("/")[0] for boot in (facts.launch_boot, facts.boot))
        # LXC gives a container a new boot id at each start, so only an equal one tells the two apart.
        where = "container" if kernel_then == kernel_now else "container or host"
        return f"{where} restarted under the run"
    if facts.supervisor_alive is None:
        handing_over = facts.launcher_alive or age < LAUNCH_GRACE_S
        return None if handing_over else "the launch was cut off before the trainer started"
    if facts.supervisor_alive:
        return None
    if facts.trainer_alive:
        return f"its supervisor was killed; the trainer (pid {facts.trainer_pid}) was told to stop"
    if facts.oom_kills:
        return f"out of memory: the kernel killed {facts.oom_kills} process(es), the supervisor among them"
    return "trainer and supervisor are gone and left no exit record: killed from outside"


def _living(facts: RunFacts, events: Sequence[Event], policy: StallPolicy) -> Health:
    kinds = {event.kind for event in events}
    if "end" in kinds:
        reason = next(e.values.get("reason") for e in reversed(events) if e.kind == "end")
        return Health(State.FINISHING, f"the last event is the end: {reason}")
    steps = [event for event in events if event.kind == "step"]
    if steps:
        return _stepping(facts, events, steps, policy)
    age = facts.now - facts.created
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
