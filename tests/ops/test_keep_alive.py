"""`launch --keep-alive N`: bounded, no crash loops, never after an incident that would repeat.

Shown able to fail: with the loop test taken out, the crashing run uses all its restarts; with `retryable` ignored,
the run that is out of memory is started again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash_ops.agent import keep_alive, launch, launchers, runs
from dflash_ops.agent.keep_alive import LONGEST_WAIT_S, Attempt, decide
from dflash_ops.agent.launch import LaunchRequest
from dflash_ops.agent.layout import Layout
from dflash_ops.agent.runs import ExitRecord
from dflash_ops.agent.supervise import Supervisor
from dflash_ops.incidents import CATALOGUE, Diagnosis, NoMatch
from tests.ops.conftest import Lab
from tests.waiting import PATIENCE_S, wait_until

UNKNOWN = NoMatch(())


def crash(saved: int = -1, code: int | None = 3, *, forwarded: tuple[str, ...] = ()) -> Attempt:
    signal = "SIGKILL" if code is None else None
    return Attempt(ExitRecord(code, signal, 0.0, "b/1", forwarded=forwarded), saved)


def test_a_crash_starts_again_within_the_bound() -> None:
    assert decide(2, [crash(1)], UNKNOWN, stopping=False).again
    assert decide(2, [crash(1), crash(2)], UNKNOWN, stopping=False).again
    over = decide(2, [crash(1), crash(2), crash(3)], UNKNOWN, stopping=False)
    assert (over.again, over.reason) == (False, "all 2 restarts are used up")
    assert not decide(0, [crash()], UNKNOWN, stopping=False).again


def test_a_loop_is_seen() -> None:
    assert decide(9, [crash(5), crash(5)], UNKNOWN, stopping=False).again
    assert "crash loop" in decide(9, [crash(5), crash(5), crash(5)], UNKNOWN, stopping=False).reason
    assert decide(9, [crash(5), crash(5), crash(6)], UNKNOWN, stopping=False).again
    assert "crash loop" in decide(9, [crash(1), crash(5), crash(5), crash(5)], UNKNOWN, stopping=False).reason


def test_the_operator_s_word_counts() -> None:
    assert not decide(9, [crash(1)], UNKNOWN, stopping=True).again
    assert not decide(9, [crash(1, forwarded=("SIGTERM",))], UNKNOWN, stopping=False).again
    assert not decide(9, [crash(1, code=0)], UNKNOWN, stopping=False).again


@pytest.mark.parametrize("incident", CATALOGUE, ids=lambda incident: incident.name)
def test_every_incident_says_whether_it_may_be_tried_again(incident) -> None:  # type: ignore[no-untyped-def]  # parametrized
    verdict = Diagnosis(incident, ())
    assert decide(9, [crash(1)], verdict, stopping=False).again == incident.retryable


def test_waits_grow_and_are_bounded() -> None:
    attempts = [crash(n) for n in range(20)]
    waits = [decide(99, attempts[: n + 1], UNKNOWN, stopping=False).wait_s for n in range(20)]
    assert waits == sorted(waits)
    assert waits[0] > 0
    assert waits[-1] == LONGEST_WAIT_S


def logs(lab: Lab) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(Path(lab.newest().directory).glob("train*.log"))}


def test_a_stumbling_run_goes_on_in_a_new_attempt_with_its_own_log(lab: Lab) -> None:
    lab.deploy()
    lab.start("standin.mode=stumble", keep_alive=3)
    status = lab.wait_for("finished")
    found = logs(lab)
    assert list(found) == ["train-2.log", "train.log"]
    assert "starting again: restart 1 of 3" in found["train.log"]
    metrics = (Path(status.directory) / "metrics.jsonl").read_text()
    assert [line for line in metrics.splitlines() if '"resumed_from": "auto"' in line]
    assert (status.attempt, Path(status.log).name) == (2, "train-2.log")
    assert lab.layout.newest_log("threadwarm").resolve().name == "train-2.log"
    assert "step" in lab.fab("tail-log", "--no-follow").stdout


def test_a_crash_loop_ends(lab: Lab) -> None:
    lab.deploy()
    lab.start("standin.mode=crash", keep_alive=9)
    status = lab.wait_for("failed")
    assert status.attempt == 3
    assert "not starting again: a crash loop" in logs(lab)["train-3.log"]


def test_out_of_memory_is_not_tried_again(lab: Lab) -> None:
    lab.deploy()
    lab.start("standin.mode=oom", keep_alive=9)
    status = lab.wait_for("failed")
    assert status.attempt == 1
    assert "not starting again: cuda-oom would only repeat" in logs(lab)["train.log"]


def test_a_follower_goes_on_into_the_next_log(lab: Lab) -> None:
    lab.deploy()
    go = lab.root / "go"
    lab.start("standin.mode=stumble", f"standin.until={go}", "standin.steps=2", keep_alive=1)
    follower = lab.start_fab("tail-log", "--lines", "all")
    assert follower.stdout is not None
    first = next(line for line in follower.stdout if line.startswith(b"step 1 "))
    go.touch()
    said, remarks = follower.communicate(timeout=PATIENCE_S)
    assert follower.returncode == 0
    assert (first + said).count(b"step 1 ") == 2
    assert b"attempt 2 has begun" in remarks


def test_stop_between_attempts_ends_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown able to fail: with the wait deaf to signals the run is tried again after it."""
    monkeypatch.setattr(keep_alive, "FIRST_WAIT_S", 2 * PATIENCE_S)
    monkeypatch.setattr(keep_alive, "LONGEST_WAIT_S", 2 * PATIENCE_S)
    supervisors: list[int] = []

    def start(layout: Layout, launcher: str, session: str, run_id: str, argv: Sequence[str]) -> launchers.Launched:
        """The supervisor in a process of its own, as ever, but with the long wait of this one."""
        child = os.fork()
        if child == 0:
            os.setsid()
            os._exit(Supervisor().run(argv[-2]))
        supervisors.append(child)
        return launchers.Launched(launcher, "")

    monkeypatch.setattr(launchers, "start", start)
    lab.deploy()
    request = LaunchRequest("between", "test", overrides={"standin.mode": "crash"}, keep_alive=9, launcher="nohup")
    directory = Path(launch.launch(lab.layout, request, lambda _: None).directory)
    wait_until(lambda: state(directory) == "restarting", "the first attempt is over")
    assert lab.fab("stop").returncode == 0
    assert os.waitstatus_to_exitcode(os.waitpid(supervisors[0], 0)[1]) == 0
    status = lab.newest()
    assert (status.state, status.attempt) == ("failed", 1)


def state(directory: Path) -> str:
    record = runs.read_run(directory)
    return record.state if record is not None else ""


def test_the_bound_is_a_number(lab: Lab) -> None:
    assert lab.fab("launch", "--keep-alive", "-1").returncode == 2
    assert lab.fab("launch", "--keep-alive", "many").returncode == 2
