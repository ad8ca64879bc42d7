"""`python -m trainer train` as a measurement sees it: a process whose events are read as they are written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from benchmarks.parts import ROOT, Work, kill_group

MARK = "TRAINER_BENCH_RUN"
"""Set in a run's environment: whoever still has it after the run's end is an orphan."""
POLL_S = 0.005
FLAT_AFTER_STEP = 20

Event = dict[str, Any]
Answer = TypeVar("Answer")


class TrainRun:
    """One run in a session of its own, with its own compile caches; killed when the block is left."""

    def __init__(
        self,
        work: Work,
        name: str,
        settings: Mapping[str, str],
        *,
        caches: Path,
        variant: str = "threadwarm",
        flags: Sequence[str] = (),
    ) -> None:
        self.directory = work.out / "runs" / name
        self.log = self.directory.with_suffix(".log")
        self.directory.mkdir(parents=True)
        self.mark = uuid.uuid4().hex
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        argv = [sys.executable, "-m", "trainer", "train", "--variant", variant, "--run-dir", str(self.directory)]
        self.began = time.time()
        with self.log.open("wb") as file:
            self.child = subprocess.Popen(
                [*argv, *words, *flags],
                cwd=ROOT,
                env={
                    **os.environ,
                    "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
                    "TRITON_CACHE_DIR": str(caches / "triton"),
                    MARK: self.mark,
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> TrainRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kill_group(self.child)
        for pid in self.orphans():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def events(self, kind: str | None = None) -> list[Event]:
        """All events so far; a line that is still being written is left for later."""
        path = self.directory / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        rows: list[Event] = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in rows if kind in (None, row["event"])]

    def wait_for(self, answer: Callable[[list[Event]], Answer | None], limit_s: float) -> Answer | None:
        """The first true answer of a function of the events; None if the run ends or the time does."""
        deadline = time.monotonic() + limit_s
        size = -1
        while True:
            ended = self.child.poll() is not None
            path = self.directory / "metrics.jsonl"
            now = path.stat().st_size if path.exists() else 0
            if now != size:
                size = now
                if found := answer(self.events()):
                    return found
            if ended or time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)

    def wait(self, limit_s: float) -> int | None:
        """The exit code; None if the run does not end in time."""
        try:
            return self.child.wait(max(0.1, limit_s))
        except subprocess.TimeoutExpired:
            return None

    def orphans(self) -> list[int]:
        """Living processes that this run started, itself left out."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            if int(folder.name) == self.child.pid:
                continue
            try:
                environment = (folder / "environ").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, IndexError):
                continue
            if f"{MARK}={self.mark}".encode() in environment.split(b"\0") and state != "Z":
                found.append(int(folder.name))
        return found

    def tail(self, lines: int = 15) -> str:
        """The end of the log, for a note."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run from its start to its end."""

    code: int | None
    """None: it did not end in time and was killed."""
    gate_s: float | None
    """From the start of the process to the open gate."""
    warmups: dict[str, float]
    """Seconds of each turn at the gate."""
    end: Event | None
    steps: list[Event]

    @property
    def clean(self) -> bool:
        """Ended by itself with exit 0: nothing hung, and nothing compiled after the gate, which would have raised."""
        return self.code == 0 and self.end is not None and self.end["reason"] == "done"

    def row(self) -> dict[str, Any]:
        """For a table."""
        return {
            "gate_s": None if self.gate_s is None else round(self.gate_s, 1),
            "exit": self.code,
            "steps": self.steps[-1]["step"] if self.steps else 0,
            "warm-ups": {name: round(seconds, 1) for name, seconds in self.warmups.items()},
        }


def outcome(run: TrainRun, code: int | None) -> Outcome:
    """What a run that ended has told."""
    opened = run.events("gate_open")
    return Outcome(
        code=code,
        gate_s=opened[0]["time"] - run.began if opened else None,
        warmups={row["thread"]: row["seconds"] for row in run.events("warmup")},
        end=next(iter(run.events("end")), None),
        steps=run.events("step"),
    )


def run_to_end(
    work: Work,
    name: str,
    settings: Mapping[str, str],
    *,
    caches: Path,
    variant: str = "threadwarm",
    limit_s: float | None = None,
) -> Outcome:
    """One whole run under a limit; a note where it did not end well."""
    with TrainRun(work, name, settings, caches=caches, variant=variant) as run:
        code = run.wait(min(work.left(), limit_s if limit_s is not None else work.left()))
        found = outcome(run, code)
        if not found.clean:
            how = "did not end in time" if code is None else f"ended with {code}"
            work.note(f"{name} {how}:\n{run.tail()}")
        return found


def memory_growth(steps: Sequence[Event]) -> dict[str, dict[str, int]]:
    """Bytes that each device's allocator grew after step 20: reserved, and the most allocated at once. Empty on CPU."""
    late = [row["memory"] for row in steps if row["step"] > FLAT_AFTER_STEP]
    if len(late) < 2:
        return {}
    return {
        device: {kind: max(row[device][kind] for row in late) - late[0][device][kind] for kind in late[0][device]}
        for device in late[0]
    }


def check_memory(work: Work, steps: Sequence[Event], what: str) -> None:
    """Reserved memory is flat to the byte after step 20, on every device.

    The most that was allocated at once is a number only: it depends on how many batches wait where, and may rise when
    an evaluation falls together with full queues.
    """
    growth = memory_growth(steps)
    if not growth:
        work.note(f"{what}: memory not compared (no GPU, or no two logged steps after step {FLAT_AFTER_STEP})")
        return
    last = steps[-1]["memory"]
    for device, kinds in growth.items():
        work.check(f"{what}: reserved memory on {device} is flat after step {FLAT_AFTER_STEP}", kinds["reserved"] == 0)
        for kind, grown in kinds.items():
            work.number(f"{what}: {kind} on {device}, bytes and their growth", [last[device][kind], grown])
