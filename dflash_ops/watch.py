"""`fab watch`: one target's run as it goes, through every drop of the connection.

The target sends whole snapshots, so a lost one costs nothing: after a drop the next one tells all. Drawing is in
`dashboard`, telling others in `Notifier`.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dflash_ops.agent import records, wire
from dflash_ops.agent.snapshot import Snapshot, WatchRequest
from dflash_ops.errors import AgentFailed, DeadlineExceeded, HostUnreachable, OpsError, UsageError
from dflash_ops.remote import Remote

SILENCE_S = 15.0
BACKOFF_S = (0.5, 15.0)
NOTIFY_LIMIT_S = 30.0
UNREACHABLE = "unreachable"
NO_RUN = "no run"


@dataclass(frozen=True, slots=True)
class View:
    """What is known now. `error` is set while the connection is down; the snapshot is then the last one."""

    target: str
    snapshot: Snapshot | None = None
    error: OpsError | None = None
    lost_for_s: float = 0.0

    @property
    def state(self) -> str:
        """The run's state, or `unreachable`, or `no run`."""
        if self.error is not None:
            return UNREACHABLE
        run = self.snapshot.run if self.snapshot else None
        return run.state if run else NO_RUN

    @property
    def detail(self) -> str:
        if self.error is not None:
            return self.error.what
        run = self.snapshot.run if self.snapshot else None
        return run.detail if run else "nothing was launched here yet"

    @property
    def run_id(self) -> str:
        run = self.snapshot.run if self.snapshot else None
        return run.run_id if run else ""

    @property
    def ended(self) -> bool:
        run = self.snapshot.run if self.snapshot else None
        return self.error is None and run is not None and not run.live


def as_json(view: View) -> dict[str, Any]:
    """One line of `--json`."""
    body: dict[str, Any] = {
        "target": view.target,
        "state": view.state,
        "detail": view.detail,
        "run": view.run_id or None,
    }
    if view.error is not None:
        body["lost_for_s"] = round(view.lost_for_s, 1)
    if view.snapshot is not None:
        body["snapshot"] = records.dump(view.snapshot)
    return body


def views(remote: Remote, target: str, request: WatchRequest) -> Iterator[View]:
    """Every snapshot, and every attempt to come back, without end. Errors that waiting cannot mend are raised."""
    last: Snapshot | None = None
    lost_at, wait = 0.0, BACKOFF_S[0]
    while True:
        try:
            for snapshot in _snapshots(remote, request):
                last, lost_at, wait = snapshot, 0.0, BACKOFF_S[0]
                yield View(target, snapshot)
        except (HostUnreachable, DeadlineExceeded, AgentFailed) as error:
            if type(error) not in (HostUnreachable, DeadlineExceeded, AgentFailed) or last is None:
                raise
            lost_at = lost_at or time.monotonic()
            yield View(target, last, error, time.monotonic() - lost_at)
            time.sleep(wait * random.uniform(0.7, 1.3))
            wait = min(BACKOFF_S[1], wait * 2)


def _snapshots(remote: Remote, request: WatchRequest) -> Iterator[Snapshot]:
    """One connection's snapshots; ends only by an error."""
    with remote.stream("watch", request) as (stream, reader):
        for event in remote.events(stream, reader, lambda: max(SILENCE_S, 3 * request.interval_s)):
            if isinstance(event, wire.Progress):
                yield _load(event.text)
            elif isinstance(event, wire.Answer):
                raise AgentFailed("the target stopped sending")


def _load(text: str) -> Snapshot:
    try:
        return records.load(Snapshot, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise AgentFailed("a snapshot cannot be read", why=str(error)) from None


@dataclass
class Notifier:
    """Calls one command at each change of state, with JSON on its standard input; never holds the display up."""

    words: tuple[str, ...]
    remark: Callable[[str], None]
    explain: Callable[[View], dict[str, Any]]
    """What a diagnosis adds; called on the notifier's own thread, only for states that ask for it."""
    _before: tuple[str, str] | None = None
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    @classmethod
    def of(cls, command: str, remark: Callable[[str], None], explain: Callable[[View], dict[str, Any]]) -> Notifier:
        """From the operator's words; they are split like a shell would, and run without one."""
        try:
            words = tuple(shlex.split(command))
        except ValueError as error:
            raise UsageError(f"--notify {command!r} cannot be split into words", why=str(error)) from None
        if not words:
            raise UsageError("--notify needs a command", hint="for example: --notify 'tee -a events.jsonl'")
        return cls(words, remark, explain)

    def see(self, view: View) -> None:
        """Tell, if the run or its state is another than before. The first look only sets what `before` is."""
        now = (view.run_id, view.state)
        before, self._before = self._before, now
        if before is None or before == now:
            return
        body = {
            "target": view.target,
            "run": view.run_id or None,
            "from": before[1],
            "to": view.state,
            "detail": view.detail,
            "time": time.time(),
        }
        self._pool.submit(self._tell, body, view)

    def close(self) -> None:
        """Wait for what is under way; each call is bounded."""
        self._pool.shutdown(wait=True)

    def _tell(self, body: dict[str, Any], view: View) -> None:
        try:
            if view.state in ("failed", "killed", "lost", "stalled", UNREACHABLE):
                body |= self.explain(view)
            done = subprocess.run(
                self.words,
                input=json.dumps(body).encode() + b"\n",
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=NOTIFY_LIMIT_S,
                check=False,
            )
            if done.returncode:
                said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
                self.remark(f"--notify ended with {done.returncode}: {said[0]}")
        except subprocess.TimeoutExpired:
            self.remark(f"--notify did not end within {NOTIFY_LIMIT_S:.0f} s and was ended")
        except OSError as error:
            self.remark(f"--notify cannot run {self.words[0]}: {error.strerror}")
