"""Stopping a run: TERM, wait for its checkpoint and its end; KILL only when asked for."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from dflash_ops.agent import lock, process, runs
from dflash_ops.agent.layout import Layout
from dflash_ops.agent.process import Identity
from dflash_ops.agent.runs import RunRecord, RunStatus
from dflash_ops.errors import DeadlineExceeded

SETTLE_S = 10.0
"""What a supervisor may take to write its record after the trainer's end."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    who: str
    run_id: str = ""
    kill: bool = False
    wait_s: float = 60.0


@dataclass(frozen=True, slots=True)
class StopResult:
    """`stopped` is False where nothing ran."""

    stopped: bool
    status: RunStatus | None


def stop(layout: Layout, request: StopRequest, say: Callable[[str], None]) -> StopResult:
    """End a run in order. A second call while the first waits only waits too; on an ended run it does nothing."""
    status = runs.find(layout, request.run_id) if request.run_id else runs.live_run(layout) or _orphaned(layout)
    record = runs.read_run(layout.run(status.run_id)) if status else None
    if (status is None or not status.live) and not request.run_id and _stop_unrecorded(layout, request, say):
        return StopResult(True, None)
    if status is None or record is None:
        return StopResult(False, runs.find(layout, ""))
    trainer = record.trainer if process.alive(record.trainer) else None
    if trainer is None and not status.live:
        return StopResult(False, status)
    saved = _Checkpoints(layout, record, say)
    ends_at = time.monotonic() + request.wait_s
    receiver = _receiver(layout, record, ends_at)
    if receiver is not None and process.send(receiver, signal.SIGTERM):
        say(f"TERM sent to run {record.run_id}: it finishes its step, writes a checkpoint and ends")
    if not _gone(layout, record, max(SETTLE_S / 10, ends_at - time.monotonic()), saved):
        if not request.kill:
            raise DeadlineExceeded(
                f"run {record.run_id} still runs {request.wait_s:.0f} s after TERM",
                why="a long step, a stuck thread, or a GPU that does not answer",
                hint="wait and `fab stop` again, or `fab stop --kill`, which loses the work since the last checkpoint",
            )
        say("still running: KILL to its whole process group")
        _kill(runs.read_run(layout.run(record.run_id)) or record)
        if not _gone(layout, record, SETTLE_S, saved):
            raise DeadlineExceeded(
                f"run {record.run_id} survives KILL",
                why="it waits inside the kernel, usually for a GPU that is lost",
                hint="look at the host's kernel log; such a process ends only with the host",
            )
    return StopResult(True, runs.find(layout, record.run_id))


def _orphaned(layout: Layout) -> RunStatus | None:
    """A lost run whose trainer still lives."""
    for status in runs.statuses(layout):
        record = runs.read_run(layout.run(status.run_id))
        if record is not None and process.alive(record.trainer):
            return status
    return None


def _stop_unrecorded(layout: Layout, request: StopRequest, say: Callable[[str], None]) -> bool:
    """End a run whose directory was deleted under it: only the note beside the lock still knows its processes."""
    holder = lock.read_holder(layout)
    if holder is None or not holder.run_id or layout.run(holder.run_id).exists():
        return False
    alive = [one for one in (holder.process, holder.trainer) if one is not None and process.alive(one)]
    if not alive:
        return False
    say(f"the directory of run {holder.run_id} is gone, its processes are not: TERM sent")
    process.send(alive[0], signal.SIGTERM)
    ends_at = time.monotonic() + request.wait_s
    if all(process.wait_gone(one, ends_at - time.monotonic()) for one in alive):
        return True
    if request.kill:
        for one in alive:
            process.send(one, signal.SIGKILL)
        if all(process.wait_gone(one, SETTLE_S) for one in alive):
            return True
    raise DeadlineExceeded(
        f"run {holder.run_id} still runs {request.wait_s:.0f} s after TERM", hint="wait, or `fab stop --kill`"
    )


class _Checkpoints:
    """Tells of a checkpoint that was not there when this was made, once."""

    def __init__(self, layout: Layout, record: RunRecord, say: Callable[[str], None]) -> None:
        self._record = record
        self._directory = layout.run(record.run_id)
        self._say = say
        self._known = self._newest()

    def look(self) -> None:
        newest = self._newest()
        if newest != self._known:
            self._known = newest
            self._say(f"checkpoint written: {newest}")

    def _newest(self) -> str | None:
        return runs.derive(self._record, self._directory).latest.checkpoint


def _receiver(layout: Layout, record: RunRecord, ends_at: float) -> Identity | None:
    """Who takes the TERM: the supervisor, or the trainer where that is left alone. A launch that is just handing over
    has neither yet; it is waited for."""
    while True:
        current = runs.read_run(layout.run(record.run_id)) or record
        for one in (current.supervisor, current.trainer):
            if process.alive(one):
                return one
        handing_over = current.supervisor is None and process.alive(current.launched_by)
        if not handing_over or time.monotonic() > ends_at:
            return None
        time.sleep(0.05)


def _gone(layout: Layout, record: RunRecord, wait_s: float, saved: _Checkpoints) -> bool:
    """Wait until trainer and supervisor have ended."""
    ends_at = time.monotonic() + wait_s
    while time.monotonic() < ends_at:
        current = runs.read_run(layout.run(record.run_id)) or record
        waiting: list[Identity] = [one for one in (current.trainer, current.supervisor) if process.alive(one) and one]
        if not waiting and (current.supervisor is not None or not process.alive(current.launched_by)):
            saved.look()
            return True
        saved.look()
        if waiting:
            process.wait_gone(waiting[0], min(0.5, max(0.0, ends_at - time.monotonic())))
        else:
            time.sleep(0.1)
    return False


def _kill(record: RunRecord) -> None:
    if record.trainer is not None and process.alive(record.trainer):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(record.trainer.pid, signal.SIGKILL)
