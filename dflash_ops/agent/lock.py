"""The launch lock: one flock from the gate to the trainer's end, and a note beside it that says whose it is."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from dflash_ops.agent import files, process, records, runs
from dflash_ops.agent.layout import Layout
from dflash_ops.agent.process import Identity
from dflash_ops.errors import LockHeld

SETTLE_S = 5.0
"""How long a lock whose holder has just ended, or has not signed yet, may stay unexplained."""


@dataclass(frozen=True, slots=True)
class Holder:
    """lock.json: for people and for error messages; the lock itself is the flock."""

    purpose: str
    run_id: str
    who: str
    since: float
    process: Identity | None
    trainer: Identity | None = None

    def describe(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        pid = self.trainer or self.process
        subject = f"run {self.run_id}" if self.run_id else self.purpose
        return f"{subject}, pid {pid.pid if pid else 'unknown'}, since {since}, by {self.who}"


def read_holder(layout: Layout) -> Holder | None:
    try:
        return records.load(Holder, files.read_json(layout.holder))
    except ValueError:
        return None


def sign(layout: Layout, holder: Holder) -> None:
    """Leave the note. A full disk must not keep clear-cache from its work, nor call a run failed that has started."""
    with contextlib.suppress(OSError):
        files.write_json(layout.holder, records.dump(holder))


def acquire(layout: Layout, purpose: str, run_id: str, who: str) -> int:
    """The locked descriptor, signed; LockHeld naming the holder otherwise."""
    ends_at = time.monotonic() + SETTLE_S
    while (descriptor := files.try_lock(layout.lock)) is None:
        holder = read_holder(layout)
        if holder is not None and _holds(layout, holder):
            raise LockHeld("another launch or run holds the lock on this target", why=holder.describe())
        if time.monotonic() > ends_at:
            last = f"last signed by {holder.describe()}" if holder else "nobody signed for it"
            raise LockHeld(
                "the lock on this target is held by a process that did not sign for it",
                why=last,
                hint=f"find it on the target: fuser -v {layout.lock}",
            )
        time.sleep(0.05)
    sign(layout, Holder(purpose, run_id, who, time.time(), process.identify(os.getpid())))
    return descriptor


def _holds(layout: Layout, holder: Holder) -> bool:
    """Whether the note matches a living process. A run that has ended is about to let go: not a holder."""
    if process.alive(holder.trainer):
        return True
    ended = bool(holder.run_id) and runs.read_exit(layout.run(holder.run_id)) is not None
    return process.alive(holder.process) and not ended
