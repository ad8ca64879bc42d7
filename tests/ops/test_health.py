"""States of a run, each from the least evidence that proves it.

Shown able to fail: with the boot id check after the process check, `test_restart_beats_a_reused_pid` fails; with
stall judged by the median alone, `test_fast_steps_do_not_stall_at_once` fails.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.events import Event, parse_events
from dflash_ops.health import ExitFacts, Health, RunFacts, StallPolicy, State, assess

T0 = 1_000_000.0


def facts(age: float = 100.0, **changes: object) -> RunFacts:
    base = RunFacts(now=T0 + age, started=T0, launch_boot_id="aaaa", boot_id="aaaa", process_alive=True)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]  # a test's own keywords


def event(kind: str, at: float, **values: object) -> Event:
    return Event(kind, T0 + at, {"event": kind, **values})


def steps(count: int, every: float, first: float = 10.0) -> list[Event]:
    return [event("step", first + every * n, step=10 * n) for n in range(count)]


WARM = [event("start", 1.0), event("warmup", 5.0, drafter=0)]


def test_starting_until_the_first_event() -> None:
    assert assess(facts(5.0), []).state is State.STARTING


def test_warming_until_the_gate_opens() -> None:
    assert assess(facts(9.0), WARM).state is State.WARMING
    assert assess(facts(9.0), [*WARM, event("gate_open", 8.0)]).state is State.TRAINING


def test_warm_up_without_progress_is_a_stall() -> None:
    assert assess(facts(4000.0), WARM).state is State.STALLED
    assert assess(facts(4000.0), []).state is State.STALLED


def test_training_and_stalled_by_the_run_s_own_median() -> None:
    events = [*WARM, *steps(10, 20.0)]
    last = 10.0 + 20.0 * 9
    fresh, late = assess(facts(last + 150), events), assess(facts(last + 170), events)
    assert fresh.state is State.TRAINING
    assert late == Health(State.STALLED, "step 90, 3 min ago; usually every 20 s")


def test_fast_steps_do_not_stall_at_once() -> None:
    events = [*WARM, *steps(50, 0.01)]
    assert assess(facts(10.5 + 30), events).state is State.TRAINING
    assert assess(facts(10.5 + 70), events).state is State.STALLED


def test_a_long_evaluation_or_checkpoint_counts_as_a_sign_of_life() -> None:
    events = [*WARM, *steps(10, 1.0), event("checkpoint", 100.0, step=90)]
    assert assess(facts(130.0), events).state is State.TRAINING


def test_finishing() -> None:
    assert assess(facts(), [*WARM, *steps(5, 1.0), event("end", 20.0, reason="stopped")]).state is State.FINISHING
    assert assess(facts(stop_requested=True), steps(5, 1.0)).state is State.FINISHING


@pytest.mark.parametrize(
    ("end", "state", "evidence"),
    [
        (ExitFacts(0), State.FINISHED, "exit code 0"),
        (ExitFacts(1), State.FAILED, "exit code 1"),
        (ExitFacts(1, oom_kills=2), State.FAILED, "exit code 1, 2 out-of-memory kill(s) during the run"),
        (ExitFacts(None, 9), State.KILLED, "SIGKILL"),
        (ExitFacts(None, 9, oom_kills=1), State.KILLED, "SIGKILL, out of memory"),
        (ExitFacts(None, 250), State.KILLED, "signal 250"),
        (ExitFacts(None), State.LOST, "the exit record holds neither an exit code nor a signal"),
    ],
)
def test_an_exit_record_decides(end: ExitFacts, state: State, evidence: str) -> None:
    assert assess(facts(exit=end, process_alive=False, boot_id="bbbb"), []) == Health(state, evidence)


def test_a_finished_run_gives_its_reason() -> None:
    events = [*steps(5, 1.0), event("end", 20.0, reason="reached max_steps")]
    assert str(assess(facts(exit=ExitFacts(0)), events)) == "finished (reached max_steps)"


def test_lost_without_a_record() -> None:
    assert str(assess(facts(process_alive=False), [])).startswith("lost (the process is gone")
    assert "out of memory" in assess(facts(process_alive=False, oom_kills=1), []).evidence


def test_restart_beats_a_reused_pid() -> None:
    host = assess(facts(boot_id="bbbb"), steps(5, 1.0))
    assert str(host) == "lost (host restarted: boot id aaaa at launch, bbbb now)"
    container = assess(facts(container_uptime_s=20.0), steps(5, 1.0))
    assert str(container) == "lost (container restarted: up for 20 s, the run began 100 s ago)"
    assert assess(facts(container_uptime_s=20.0, boot_id="bbbb"), []).evidence.startswith("host restarted")
    assert assess(facts(container_uptime_s=5000.0), steps(5, 20.0)).state.live


def test_unknown_is_not_dead() -> None:
    unknown = facts(process_alive=None, boot_id=None, launch_boot_id=None)
    assert assess(unknown, steps(5, 20.0)).state is State.TRAINING


TIMES = st.floats(allow_nan=False, allow_infinity=False, width=32)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["start", "warmup", "gate_open", "step", "eval", "end", "?"]), TIMES)),
    st.booleans() | st.none(),
    TIMES,
)
def test_every_history_has_a_state(history: list[tuple[str, float]], alive: bool | None, now: float) -> None:
    events = [Event(kind, time, {}) for kind, time in history]
    health = assess(RunFacts(now=now, started=0.0, process_alive=alive), events, StallPolicy())
    assert health.evidence
    assert health.state.live == (alive is not False)


@settings(max_examples=300, deadline=None)
@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "replace")))
def test_any_text_parses(text: str) -> None:
    for found in parse_events(text + '\n{"event": "step", "time": 3, "step": 1}'):
        assert found.kind


def test_half_written_lines_are_skipped() -> None:
    text = '{"event":"step","time":1,"step":1}\n\0\0\n[]\n{"event":3}\n{"event":"x","time":NaN}\n{"event":"step","ti'
    assert [event.step for event in parse_events(text)] == [1]
    (only,) = parse_events('{"event":"step","time":1,"loss":NaN,"queues":{"a":2,"b":"?"},"util":[0.5,null]}')
    assert only.number("loss") != only.number("loss")
    assert only.numbers("queues") == {"a": 2.0}
    assert only.numbers("util") == {"0": 0.5}
