"""The real process: signals, exit codes, the hung warm-up, resume across processes.

Every wait is for a line of the log, with a deadline.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_run import events, small_flags

from trainer.signals import ASK_AGAIN_S

ROOT = Path(__file__).parents[2]
WAIT_S = 180.0


class Process:
    """A trainer in a process of its own, read line by line."""

    def __init__(self, argv: list[str]) -> None:
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self.child = subprocess.Popen(
            argv,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self._queue.put(line)
        self._queue.put(None)

    def until(self, text: str | None) -> None:
        """Read until a line holds `text`; None: to the end."""
        while True:
            line = self._queue.get(timeout=WAIT_S)
            if line is None:
                assert text is None, f"{text!r} never came:\n{self.text}"
                return
            self.lines.append(line)
            if text is not None and text in line:
                return

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def end(self) -> int:
        self.until(None)
        return self.child.wait(WAIT_S)


@contextmanager
def running(argv: list[str]) -> Iterator[Process]:
    process = Process(argv)
    try:
        yield process
    finally:
        process.child.kill()
        process.child.wait()


def train(directory: Path, *more: str, **overrides: str) -> list[str]:
    flags = small_flags({key.replace("__", "."): value for key, value in overrides.items()})
    return [sys.executable, "-m", "trainer", "train", "--run-dir", str(directory), *flags, *more]


def losses(directory: Path) -> list[list[float]]:
    return [[row["step"], row["loss"], row["grad_norm"], row["lr"]] for row in events(directory, "step")]


LONG = {"run__max_steps": "24", "run__eval_every": "100", "run__checkpoint_every": "100"}


PREAMBLE = """
import sys, threading
from dataclasses import replace
import trainer.launch as launch
from trainer.assembly import assemble
from trainer.cli import main
from trainer.pipeline import Pipeline

def change(parts):
    real = parts.step
    def step(rank):
        made = real(rank)
        if rank == 1:
            made.warm_up = lambda capturing: hang_for_ever()
        return made
    return replace(parts, step=step)

def hang_for_ever():
    print("drafter1 hangs now", flush=True)
    threading.Event().wait()

launch.assemble = lambda *args, **more: change(assemble(*args, **more))
sys.exit(main(sys.argv[1:]))
"""
HELD_STEP = PREAMBLE.replace(
    "made.warm_up = lambda capturing: hang_for_ever()",
    "made.accumulate = held(made.accumulate)",
).replace(
    "def hang_for_ever",
    """asked = threading.Event()
request_stop = Pipeline.request_stop
Pipeline.request_stop = lambda *words: (request_stop(*words), asked.set())

def held(accumulate):
    calls = []
    def once_asked():
        calls.append(1)
        if len(calls) > 8:
            asked.wait()
        accumulate()
    return once_asked

def hang_for_ever""",
)


def held(directory: Path) -> list[str]:
    """A run that takes a few steps, and the rest once it was asked to stop: else it could end before the signal."""
    return [sys.executable, "-c", HELD_STEP, *train(directory, **LONG)[3:]]


def stopped_by(number: signal.Signals, directory: Path) -> int:
    """Start, send the signal in steady state, check the orderly end. Returns the step of the checkpoint."""
    with running(held(directory)) as process:
        process.until("step      3/24")
        process.child.send_signal(number)
        assert process.end() == 0
    (end,) = events(directory, "end")
    assert end["reason"] == "stopped"
    assert 3 <= end["step"] < 24
    assert Path(end["summary"]["checkpoint"]).name == f"step-{end['step']:08d}"
    return int(end["step"])


def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    """TERM in the middle of a run: step finished, checkpoint, exit 0; resumed, the losses are those of one whole run.

    Fails when prefetched batches count as consumed, or when the anchors come from a running generator.
    """
    stopped_by(signal.SIGTERM, tmp_path / "a")
    with running(train(tmp_path / "a", "--resume", "auto", **LONG)) as process:
        assert process.end() == 0, process.text
    with running(train(tmp_path / "b", **LONG)) as process:
        assert process.end() == 0, process.text
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    state = [json.loads((tmp_path / d / "checkpoints/step-00000024/state.json").read_text()) for d in "ab"]
    assert state[0]["weights_sha256"] == state[1]["weights_sha256"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_hangup_and_interrupt_stop_as_term_does(number: signal.Signals, tmp_path: Path) -> None:
    step = stopped_by(number, tmp_path)
    assert (tmp_path / f"checkpoints/step-{step:08d}/state.json").is_file()


def hanging(directory: Path, **overrides: str) -> list[str]:
    return [sys.executable, "-c", PREAMBLE, *train(directory, **overrides)[3:]]


def test_a_warm_up_that_hangs_for_ever_ends_the_process(tmp_path: Path) -> None:
    """Drafter 1 hangs: stacks of all threads, the culprit by name, the `end` event, exit 70.

    Fails (times out) without the watchdog.
    """
    with running(hanging(tmp_path, run__gate_deadline_s="20")) as process:
        assert process.end() == 70
    assert "--- thread drafter1 ---" in process.text
    assert "hang_for_ever" in process.text
    for name in ("MainThread", "drafter0", "verifier0", "target0", "prefetcher"):
        assert f"--- thread {name} ---" in process.text
    (end,) = events(tmp_path, "end")
    assert (end["reason"], end["exit_code"], end["culprit"]) == ("gate_deadline", 70, "drafter1")
    assert [row["thread"] for row in events(tmp_path, "warmup")] == ["drafter0"]
    assert events(tmp_path, "gate_open") == []


def test_term_during_warm_up_leaves_at_once_with_nothing_to_save(tmp_path: Path) -> None:
    with running(hanging(tmp_path, run__gate_deadline_s="100")) as process:
        process.until("drafter1 hangs now")
        process.child.send_signal(signal.SIGTERM)
        assert process.end() == 0
    assert "nothing to save" in process.text
    (end,) = events(tmp_path, "end")
    assert (end["reason"], end["exit_code"]) == ("stopped", 0)
    assert not (tmp_path / "checkpoints").exists()


STUCK_STEP = PREAMBLE.replace(
    "made.warm_up = lambda capturing: hang_for_ever()",
    "made.accumulate = stuck(made)",
).replace(
    "def hang_for_ever",
    """def stuck(made):
    real = made.accumulate
    calls = []
    def accumulate():
        calls.append(1)
        if len(calls) > 3:
            hang_for_ever()
        real()
    return accumulate

def hang_for_ever""",
)


def test_a_stop_that_cannot_finish_its_step_still_ends(tmp_path: Path) -> None:
    """Drafter 1 hangs in steady state; TERM cannot be served, so the deadline ends the process with exit 1."""
    argv = [sys.executable, "-c", STUCK_STEP, *train(tmp_path, run__max_steps="50", run__stop_deadline_s="1")[3:]]
    with running(argv) as process:
        process.until("drafter1 hangs now")
        process.child.send_signal(signal.SIGTERM)
        assert process.end() == 1
    (end,) = events(tmp_path, "end")
    assert end["reason"] == "error"
    assert "drafter1" in end["error"]


def test_a_second_term_ends_at_once(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", STUCK_STEP, *train(tmp_path, run__max_steps="50", run__stop_deadline_s="100")[3:]]
    with running(argv) as process:
        process.until("drafter1 hangs now")
        process.child.send_signal(signal.SIGTERM)
        process.until("finishing this step")
        time.sleep(ASK_AGAIN_S)
        process.child.send_signal(signal.SIGTERM)
        assert process.end() == 1
    assert events(tmp_path, "end")[0]["reason"] == "killed"


def test_hup_and_term_together_are_one_request(tmp_path: Path) -> None:
    """As a container's shutdown sends them. Fails (exit 1, no checkpoint) when any second signal ends the process."""
    with running(held(tmp_path)) as process:
        process.until("step      3/24")
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
            process.child.send_signal(number)
        assert process.end() == 0
    (end,) = events(tmp_path, "end")
    assert end["reason"] == "stopped"
    assert Path(end["summary"]["checkpoint"]).name == f"step-{end['step']:08d}"


class TestCommandLine:
    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "trainer", *words],
            cwd=ROOT,
            text=True,
            capture_output=True,
            timeout=WAIT_S,
            check=False,
        )

    def test_unknown_variant(self, tmp_path: Path) -> None:
        done = self.run("train", "--variant", "nonsense", "--run-dir", str(tmp_path / "run"))
        assert done.returncode == 2
        assert "threadwarm, flex, graphwarm, sdpa" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "run").exists()

    def test_wrong_key(self) -> None:
        done = self.run("config", "--set", "optim.lrr=1")
        assert done.returncode == 2
        assert "did you mean 'optim.lr'" in done.stderr

    def test_variants_as_json(self) -> None:
        done = self.run("variants", "--json")
        assert list(json.loads(done.stdout)["variants"]) == ["threadwarm", "flex", "graphwarm", "sdpa"]

    def test_config_is_json_with_overrides(self) -> None:
        done = self.run("config", "--variant", "sdpa", "--set", "run.max_steps=7")
        assert json.loads(done.stdout)["run"]["max_steps"] == 7

    def test_a_directory_with_checkpoints_is_not_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
        done = self.run("train", "--run-dir", str(tmp_path))
        assert done.returncode == 2
        assert "--resume auto" in done.stderr

    def test_missing_data_is_told_without_a_traceback(self, tmp_path: Path) -> None:
        done = self.run("train", "--run-dir", str(tmp_path), "--set", f"data.source={tmp_path}/nothing.txt")
        assert done.returncode == 1
        assert "nothing.txt" in done.stdout
        assert "Traceback" not in done.stdout + done.stderr
        assert events(tmp_path, "end")[0]["reason"] == "error"


SLOW_IMPORT = """
import sys, threading
from trainer.cli import main

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "trainer.launch":
            print("importing", flush=True)
            threading.Event().wait(180)

sys.meta_path.insert(0, Slow())
main(["train", "--run-dir", sys.argv[1]])
"""


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_while_torch_is_imported_ends_with_0(tmp_path: Path, asked: signal.Signals) -> None:
    """Without `leave_when_asked` the process died of the signal."""
    process = Process([sys.executable, "-c", SLOW_IMPORT, str(tmp_path)])
    process.until("importing")
    process.child.send_signal(asked)
    process.until(None)
    assert process.child.wait(WAIT_S) == 0
    assert f"{asked.name} during start-up: nothing was trained" in process.text
