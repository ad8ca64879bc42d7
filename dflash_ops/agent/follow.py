"""Following a log by byte offset and inode, so that a reader who was cut off goes on where it stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.agent import runs
from dflash_ops.agent.layout import Layout
from dflash_ops.agent.runs import RunStatus
from dflash_ops.agent.wire import Beat, Data, Event, Progress
from dflash_ops.errors import UsageError

PIECE = 1 << 18
POLL_S = 0.1
STATE_POLL_S = 1.0
ALL_LINES = -1


@dataclass(frozen=True, slots=True)
class FollowRequest:
    """Where to begin: at `offset` of the file with `inode`, or `lines` before the end where offset is None."""

    run_id: str
    lines: int = ALL_LINES
    offset: int | None = None
    inode: int = 0
    follow: bool = True
    beat_s: float = 2.0


@dataclass(frozen=True, slots=True)
class FollowEnd:
    """All bytes have been sent: the run has ended, or following was not asked for."""

    offset: int
    status: RunStatus


def follow(layout: Layout, request: FollowRequest, emit: Callable[[Event], bool]) -> FollowEnd:
    """Send the log as it grows until the run has ended. A beat goes out when nothing else does.

    The beat also ends an abandoned follower: with nobody reading, writing it fails.
    """
    status = runs.find(layout, request.run_id)
    if status is None:
        raise UsageError("there is no run on this target yet", hint="`fab deploy launch`")
    path = Path(status.log)
    position = _Position(path, emit)
    position.begin(request)
    asked = beaten = time.monotonic()
    while True:
        ended = not status.live
        if position.send_new():
            beaten = time.monotonic()
        if ended or not request.follow:
            # The state was read before the last bytes: nothing can come after them.
            return FollowEnd(position.offset, status)
        now = time.monotonic()
        if now - beaten >= request.beat_s:
            if not emit(Beat()):
                return FollowEnd(position.offset, status)
            beaten = now
        if now - asked >= STATE_POLL_S:
            status = runs.find(layout, status.run_id) or status
            asked = now
            if status.log != str(path):
                position.send_new()
                path = Path(status.log)
                position = _Position(path, emit)
                emit(Progress(f"attempt {status.attempt} has begun; its own log follows"))
            if not status.live:
                continue
        time.sleep(POLL_S)


class _Position:
    """How much of which file has been sent."""

    def __init__(self, path: Path, emit: Callable[[Event], bool]) -> None:
        self._path = path
        self._emit = emit
        self.offset = 0
        self.inode = 0
        self._until: int | None = None
        """Where to stop: the end of the log as it was when its last lines were counted."""

    def begin(self, request: FollowRequest) -> None:
        try:
            info = self._path.stat()
        except FileNotFoundError:
            return
        self.inode = info.st_ino
        if not request.follow:
            self._until = info.st_size
        if request.offset is None:
            self.offset = line_start(self._path, request.lines, info.st_size)
        elif request.inode not in (0, info.st_ino) or request.offset > info.st_size:
            self._emit(Progress("the log was replaced or cut; starting again at its beginning"))
        else:
            self.offset = request.offset

    def send_new(self) -> bool:
        """Send what is new; True where there was something."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return False
        sent = False
        with file:
            info = os.fstat(file.fileno())
            if self.inode and (info.st_ino != self.inode or info.st_size < self.offset):
                self._emit(Progress("the log was replaced or cut; starting again at its beginning"))
                self.offset = 0
            self.inode = info.st_ino
            file.seek(self.offset)
            while piece := file.read(PIECE if self._until is None else max(0, min(PIECE, self._until - self.offset))):
                if not self._emit(Data(self.offset, self.inode, piece)):
                    break
                self.offset += len(piece)
                sent = True
        return sent


def line_start(path: Path, lines: int, end: int) -> int:
    """The offset at which the last `lines` lines of the first `end` bytes begin; an unfinished last line counts."""
    if lines < 0:
        return 0
    with path.open("rb") as file:
        if lines == 0:
            return end
        position, wanted = end, lines
        if end:
            file.seek(end - 1)
            wanted += file.read(1) == b"\n"
        while position > 0:
            size = min(PIECE, position)
            position -= size
            file.seek(position)
            block = file.read(size)
            count = block.count(b"\n")
            if count < wanted:
                wanted -= count
                continue
            at = len(block)
            for _ in range(wanted):
                at = block.rindex(b"\n", 0, at)
            return position + at + 1
    return 0
