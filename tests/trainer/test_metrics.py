"""metrics.jsonl, the human log, the summary."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from trainer.events import Checkpoint, End, Eval, GateOpen, Start, Step, Warmup, human
from trainer.metrics import Metrics
from trainer.summary import Summary, SummaryKeeper


def step(number: int = 1, **changes: Any) -> Step:
    values: dict[str, Any] = {
        "step": number,
        "max_steps": 10,
        "loss": 2.5,
        "accept_len": 1.5,
        "accuracy": 0.25,
        "tokens": 100,
        "context_tokens_per_s": 1000.0,
        "block_tokens_per_s": 500.0,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "memory_gb": 1.25,
        "queues": {"target0 -> drafter0": 2},
        "utilization": {"drafter0": 0.5},
    }
    return Step(**{**values, **changes})


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_one_object_per_line_with_event_and_time(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, log_fd=os.open(os.devnull, os.O_WRONLY))
    for event in (
        Start(release="r", variant="sdpa", config={}, versions={}, gpus=[], cpuset=[0]),
        Warmup(thread="drafter0", seconds=1.0),
        GateOpen(seconds=2.0),
        step(),
        Eval(step=1, accept_len=1.5, by_position=[0.5], blocks=3, seconds=0.1),
        Checkpoint(step=1, path="p", seconds=0.1),
        End(reason="done", exit_code=0, step=1),
    ):
        metrics.emit(event)
    found = rows(tmp_path)
    assert [row["event"] for row in found] == ["start", "warmup", "gate_open", "step", "eval", "checkpoint", "end"]
    assert all(isinstance(row["time"], float) for row in found)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    """TensorBoard's writer raised it in the thread of drafter 0; and closing raised it once more at the end."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False)
    if mount.returncode != 0:
        pytest.skip("mount is not allowed here")
    try:
        read_end, log_fd = os.pipe()
        metrics = Metrics(tmp_path, tensorboard=True, log_fd=log_fd)
        metrics.emit(step(1))
        with contextlib.suppress(OSError), (tmp_path / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for number in range(2, 60):
            metrics.emit(step(number))
            metrics.emit(Eval(step=number, accept_len=1.5, by_position=[0.5], blocks=3, seconds=0.1))
        metrics.emit(End(reason="done", exit_code=0, step=1))
        metrics.close()
        assert "tensorboard gives up" in os.read(read_end, 1 << 16).decode()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_nothing_after_the_end(tmp_path: Path) -> None:
    """Fails without the `_ended` check: the watchdog and the main thread may both want the last word."""
    metrics = Metrics(tmp_path, log_fd=os.open(os.devnull, os.O_WRONLY))
    metrics.emit(End(reason="gate_deadline", exit_code=70, step=0))
    metrics.emit(End(reason="done", exit_code=0, step=0))
    metrics.emit(step())
    assert [row["reason"] for row in rows(tmp_path)] == ["gate_deadline"]


def test_a_number_that_is_none_stays_json(tmp_path: Path) -> None:
    """json.dumps writes a bare NaN, which no other JSON reader accepts."""
    metrics = Metrics(tmp_path, log_fd=os.open(os.devnull, os.O_WRONLY))
    metrics.emit(step(loss=float("nan"), grad_norm=float("inf")))
    (row,) = rows(tmp_path)
    assert row["loss"] == "nan"
    assert row["grad_norm"] == "inf"


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, log_fd=os.open(os.devnull, os.O_WRONLY))
    threads = [
        threading.Thread(target=lambda k=k: [metrics.emit(step(100 * k + i)) for i in range(50)]) for k in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(row["step"] for row in rows(tmp_path)) == sorted(100 * k + i for k in range(8) for i in range(50))


def test_a_torn_last_line_of_a_killed_run_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "step", "loss"')
    Metrics(tmp_path, log_fd=os.open(os.devnull, os.O_WRONLY)).emit(step(7))
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 7


def test_a_closed_log_does_not_end_the_run(tmp_path: Path) -> None:
    """Who read the pipe went away; EPIPE must not reach training."""
    read, write = os.pipe()
    os.close(read)
    metrics = Metrics(tmp_path, log_fd=write)
    metrics.emit(step())
    assert len(rows(tmp_path)) == 1


def test_the_header_is_a_scientific_record() -> None:
    lines = human(
        Start(
            release="abc123",
            variant="threadwarm",
            config={"variant": "threadwarm", "optim": {"lr": 0.001, "betas": [0.9, 0.999]}},
            versions={"python": "3.12", "torch": "2.11", "triton": "absent"},
            gpus=["NVIDIA H200"],
            cpuset=[0, 1, 2, 5],
            notes=["said once"],
        )
    )
    text = "\n".join(lines)
    for part in (
        "release   abc123",
        "torch 2.11",
        "triton absent",
        "NVIDIA H200",
        "0-2,5 (4 cores)",
        "lr=0.001",
        "betas=[0.9,0.999]",
        "said once",
    ):
        assert part in text


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    metrics = Metrics(tmp_path, tensorboard=True, log_fd=os.open(os.devnull, os.O_WRONLY))
    metrics.emit(step(3))
    metrics.emit(Eval(step=3, accept_len=1.75, by_position=[0.5], blocks=3, seconds=0.1))
    metrics.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Scalars("train/loss")[0].value == pytest.approx(2.5)
    assert found.Scalars("train/utilization/drafter0")[0].step == 3
    assert found.Scalars("heldout/accept_len")[0].value == pytest.approx(1.75)


class TestSummary:
    def test_first_stays_and_last_moves(self) -> None:
        keeper = SummaryKeeper()
        for loss in (3.0, 2.0, 1.0):
            keeper.update(loss_first=loss, loss_last=loss)
        assert (keeper.summary.loss_first, keeper.summary.loss_last) == (3.0, 1.0)

    def test_lines(self) -> None:
        text = "\n".join(Summary(steps=5, accept_len_first=1.0, accept_len_last=1.8, checkpoint="c/step-5").lines())
        assert "1.000 -> 1.800  (1.80 x)" in text
        assert "c/step-5" in text
        assert "not measured" in text  # the loss
