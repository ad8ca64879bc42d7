"""What a run says: metrics.jsonl, the human log and TensorBoard, all from the same frozen events.

metrics.jsonl holds one object per line with `event` and `time` (seconds since the epoch). The human log goes
to standard output through one formatter. Both are written with plain `write` calls on file descriptors: a
thread that hangs inside a print must not be able to keep the watchdog from having the last word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from trainer.events import End, Eval, Event, Step, human


class _Board(Protocol):
    def add_scalar(self, tag: str, value: float, step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """The three sinks of a run. Thread-safe; nothing is written after `end`."""

    LOCK_S = 5.0

    def __init__(self, run_dir: Path, *, tensorboard: bool = False, log_fd: int = 1) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._log_fd = log_fd
        self._lock = threading.Lock()
        self._ended = False
        self._board = _board(run_dir / "tensorboard") if tensorboard else None
        _end_torn_line(self.path, self._fd)

    def emit(self, event: Event) -> None:
        """Write one event to all sinks."""
        line = json.dumps(_jsonable({"event": event.event, "time": time.time(), **dataclasses.asdict(event)}))
        # A bounded wait: if the holder hangs (a dead disk), the line is written without the lock, still whole.
        held = self._lock.acquire(timeout=self.LOCK_S)
        try:
            if self._ended:
                return
            self._ended = isinstance(event, End)
            _write(self._fd, line + "\n")
            for text in human(event):
                self._say(text)
            self._scalars(event)
        finally:
            if held:
                self._lock.release()

    def say(self, text: str) -> None:
        """A line of the human log that is no event."""
        self._say(text)

    @property
    def ended(self) -> bool:
        return self._ended

    def close(self) -> None:
        """Flush to the disk; the object is not used afterwards."""
        with contextlib.suppress(OSError):  # a full disk has been told, and must not hide how the run ended
            os.fsync(self._fd)
            if self._board is not None:
                self._board.close()

    def _say(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        _write(self._log_fd, "".join(f"{stamp} {line}\n" for line in text.splitlines() or [""]))

    def _scalars(self, event: Event) -> None:
        if self._board is None or not isinstance(event, (Step, Eval)):
            return
        try:
            for name, number in _numbers(event):
                self._board.add_scalar(name, number, event.step)
            if isinstance(event, Eval):
                self._board.flush()
        except OSError as error:
            # Its writer thread reports a full disk here. Nothing is lost: metrics.jsonl has the same numbers.
            self._board = None
            self._say(f"tensorboard gives up: {error}")


def _numbers(event: Step | Eval) -> Iterator[tuple[str, float]]:
    """An event's numbers under TensorBoard's tags."""
    prefix = "train" if isinstance(event, Step) else "heldout"
    for key, value in dataclasses.asdict(event).items():
        for name, number in (value if isinstance(value, dict) else {"": value}).items():
            if isinstance(number, (int, float)) and key not in ("step", "max_steps"):
                yield f"{prefix}/{key}{'/' + name if name else ''}", number


def _jsonable(value: Any) -> Any:
    """JSON has no NaN and no infinity; they become the words a reader expects."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value


def _write(fd: int, text: str) -> None:
    data = text.encode(errors="replace")
    while data:
        try:
            data = data[os.write(fd, data) :]
        except OSError:
            # The reader of the log went away or the disk is full; the run itself must not die of it.
            return


def _end_torn_line(path: Path, fd: int) -> None:
    """A killed writer may have left half a line; the next event must start on its own."""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() == 0:
            return
        file.seek(-1, os.SEEK_END)
        torn = file.read(1) != b"\n"
    if torn:
        _write(fd, "\n")


def _board(directory: Path) -> _Board | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    writer: _Board = SummaryWriter(str(directory))
    return writer
