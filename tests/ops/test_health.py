"""States of a run, each from the least evidence that proves it.

Shown able to fail: with the boot check taken out, `test_restart_beats_a_reused_pid` fails; with
stall judged by the median alone, `test_fast_steps_do_not_stall_at_once` fails.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.events import Event, parse_events
from dflash_ops.health import LAUNCH_GRACE_S, ExitFacts, Health, RunFacts, StallPolicy, State, assess

T0 = 1_000_000.0


def facts(age: float = 100.0, **changes: object) -> RunFacts:
    base = RunFacts(
        now=T0 + age, created=T0, launch_boot="k1/7", boot="k1/7", supervisor_alive=True, trainer_alive=True
    )
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
        (ExitFacts(0, stopped=True), State.FINISHED, "stopped on request"),
        (
            ExitFacts(None, "SIGTERM", stopped=True),
            State.FINISHED,
            "stopped on request (SIGTERM) while it was starting up",
        ),
        (ExitFacts(None, "SIGTERM"), State.KILLED, "ended by SIGTERM"),
        (ExitFacts(None, "SIGKILL", stopped=True), State.KILLED, "ended by SIGKILL"),
        (ExitFacts(1), State.FAILED, "exit code 1"),
        (ExitFacts(1, reason="the trainer could not start"), State.FAILED, "the trainer could not start"),
        (ExitFacts(1, oom_kills=2), State.FAILED, "exit code 1; the kernel killed 2 process(es) here for memory"),
        (ExitFacts(None, "SIGKILL"), State.KILLED, "ended by SIGKILL"),
        (
            ExitFacts(None, "SIGKILL", oom_kills=1),
            State.KILLED,
            "ended by SIGKILL; the kernel killed 1 process(es) here for memory",
        ),
        (ExitFacts(None, reason="the launch failed: no room"), State.FAILED, "the launch failed: no room"),
        (ExitFacts(None), State.LOST, "the exit record holds neither an exit code nor a signal"),
    ],
)
def test_an_exit_record_decides(end: ExitFacts, state: State, evidence: str) -> None:
    dead = facts(exit=end, supervisor_alive=False, trainer_alive=False, boot="k2/9")
    assert assess(dead, []) == Health(state, evidence)


def test_an_end_event_gives_the_reason() -> None:
    done = [*steps(5, 1.0), event("end", 20.0, reason="done")]
    assert str(assess(facts(exit=ExitFacts(0)), done)) == "finished (done)"
    hung = [event("start", 1.0), event("end", 20.0, reason="gate_deadline")]
    assert str(assess(facts(exit=ExitFacts(70)), hung)) == "failed (exit code 70 (gate_deadline))"


def test_the_launch_has_a_grace_and_then_is_lost() -> None:
    before = {"supervisor_alive": None, "trainer_alive": None}
    assert assess(facts(10.0, **before), []).state is State.STARTING
    assert assess(facts(100.0, launcher_alive=True, **before), []).state is State.STARTING
    cut_off = assess(facts(100.0, **before), [])
    assert str(cut_off) == "lost (the launch was cut off before the trainer started)"


def test_lost_without_a_record() -> None:
    gone = facts(supervisor_alive=False, trainer_alive=False)
    assert assess(gone, []).evidence.startswith("trainer and supervisor are gone")
    assert "out of memory" in assess(dataclasses.replace(gone, oom_kills=1), []).evidence
    orphan = assess(facts(supervisor_alive=False, trainer_pid=4121), steps(5, 1.0))
    assert orphan == Health(State.LOST, "its supervisor was killed; the trainer (pid 4121) was told to stop")


def test_restart_beats_a_reused_pid() -> None:
    assert str(assess(facts(boot="k2/9"), steps(5, 1.0))) == "lost (container or host restarted under the run)"
    assert str(assess(facts(boot="k1/9"), steps(5, 1.0))) == "lost (container restarted under the run)"


def test_a_trainer_that_just_ended_is_finishing() -> None:
    assert assess(facts(trainer_alive=False), steps(5, 1.0)).state is State.FINISHING


TIMES = st.floats(allow_nan=False, allow_infinity=False, width=32)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["start", "warmup", "gate_open", "step", "eval", "end", "?"]), TIMES)),
    st.booleans() | st.none(),
    st.booleans() | st.none(),
    TIMES,
)
def test_every_history_has_a_state(
    history: list[tuple[str, float]], supervisor: bool | None, trainer: bool | None, now: float
) -> None:
    events = [Event(kind, time, {}) for kind, time in history]
    known = RunFacts(now, 0.0, "k/1", "k/1", supervisor_alive=supervisor, trainer_alive=trainer)
    health = assess(known, events, StallPolicy())
    assert health.evidence
    assert health.state.live == (supervisor is True or (supervisor is None and now < LAUNCH_GRACE_S))


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
