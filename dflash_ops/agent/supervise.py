"""The supervisor: owns the trainer's process, passes TERM and HUP on, starts it again where that was asked for
(`keep_alive`), and records how it ended.

It starts in a tmux pane, a systemd unit or a session of its own, takes the run and the launch lock from the launch
(`handover`), and stays until the trainer has ended. The trainer inherits the lock: as long as either lives, no
second launch can pass the gate.

Everything it needs is imported at the start; it must not depend on a file that a later deploy could remove.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from dflash_ops.agent import evidence, files, gpu_log, handover, keep_alive, process, runs
from dflash_ops.agent.handover import Assignment, Taken
from dflash_ops.agent.keep_alive import Attempt
from dflash_ops.agent.layout import Layout
from dflash_ops.agent.runs import ExitRecord
from dflash_ops.errors import OpsError
from dflash_ops.incidents import Diagnosis, NoMatch, diagnose

HANDOVER_S = 30.0
PR_SET_PDEATHSIG = 1
RESERVE = ".reserve"
RESERVED_BYTES = 16 << 10
LIBC = ctypes.CDLL(None, use_errno=True)
FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def attempt_log(number: int) -> str:
    """The log of the first life of a run is train.log; each later one has its own."""
    return "train.log" if number == 1 else f"train-{number}.log"


class Supervisor:
    """One run, from start to exit record."""

    def __init__(self) -> None:
        self._trainer: subprocess.Popen[bytes] | None = None
        self._asked: list[str] = []
        self._directory: Path | None = None

    def run(self, nonce: str) -> int:
        """The whole life of a supervisor; returns its exit code."""
        # Ctrl-C in an attached pane must not end the run; the viewer below inherits this.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in FORWARDED:
            signal.signal(number, self._on_signal)
        os.umask(0o022)
        try:
            connection, assignment, lock = handover.take(nonce, HANDOVER_S)
        except (OSError, OpsError, ValueError) as error:
            print(f"dflash: no run to supervise: {error}", file=sys.stderr)
            return 14
        self._directory = Path(assignment.directory)
        _reserve(self._directory)
        attempts: list[Attempt] = []
        while True:
            attempt = len(attempts) + 1
            with (self._directory / attempt_log(attempt)).open("ab", buffering=0) as log:
                oom_before = process.oom_kills()
                try:
                    trainer = self._start(assignment, lock, log.fileno())
                    self._record_start(trainer.pid, attempt)
                except OSError as error:
                    return self._cannot_start(error, log.fileno(), connection if attempt == 1 else None)
                if attempt == 1:
                    handover.answer(connection, Taken(trainer.pid))
                    # A launch that gave up waiting has written a failure; the run lives, so that record is wrong.
                    (self._directory / "exit.json").unlink(missing_ok=True)
                with _viewer(Path(log.name)):
                    returncode = self._wait(trainer)
                end = self._ended(returncode, oom_before)
                _say(log.fileno(), f"the trainer ended: {_ending(end)}")
                attempts.append(Attempt(end, runs.newest_step(self._directory)))
                decision = self._decide(assignment, attempts)
                if end.code != 0 and assignment.keep_alive:
                    _say(
                        log.fileno(),
                        f"{'starting again' if decision.again else 'not starting again'}: {decision.reason}",
                    )
            if not decision.again or not self._wait_for_next(decision.wait_s):
                break
            if attempts[-1].saved >= 0:
                assignment = dataclasses.replace(assignment, argv=keep_alive.with_resume(assignment.argv))
        _write_exit(self._directory, end)
        with contextlib.suppress(OSError):
            print(f"\n[dflash] {self._directory.name} ended: {_ending(end)}")
        return 0

    def _cannot_start(self, error: OSError, log: int, connection: socket.socket | None) -> int:
        assert self._directory is not None
        end = ExitRecord(127, None, time.time(), process.boot(), reason=f"the trainer cannot start: {error}")
        _say(log, end.reason)
        _write_exit(self._directory, end)
        if connection is not None:
            handover.answer(connection, Taken(None, str(error)))
        return 1

    def _decide(self, assignment: Assignment, attempts: list[Attempt]) -> keep_alive.Decision:
        """Diagnose only where it matters: reading the evidence takes a moment."""
        assert self._directory is not None
        verdict: Diagnosis | NoMatch = NoMatch(())
        if attempts[-1].end.code != 0 and assignment.keep_alive and not self._asked:
            found = [
                *evidence.of_run(self._directory),
                *evidence.of_machine(attempts[-1].end, self._trainer.pid if self._trainer else 0),
            ]
            verdict = diagnose(evidence.EvidenceAnswer(None, tuple(found)).evidence())
        return keep_alive.decide(assignment.keep_alive, attempts, verdict, stopping=bool(self._asked))

    def _wait_for_next(self, seconds: float) -> bool:
        """Wait before the next attempt; False when a signal to stop came."""
        self._record_state("restarting")
        ends_at = time.monotonic() + seconds
        while not self._asked and time.monotonic() < ends_at:
            time.sleep(0.05)
        return not self._asked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        first = not self._asked
        self._asked.append(name)
        # A container's shutdown sends HUP and TERM within a moment, and the trainer takes a second signal as
        # "at once": only the first is passed on.
        if first and self._trainer is not None:
            self._trainer.send_signal(number)
            self._record_state("stopping")

    def _record_state(self, state: str) -> None:
        record = runs.read_run(self._directory) if self._directory is not None else None
        if self._directory is not None and record is not None:
            with contextlib.suppress(OSError):  # a full disk must not keep the signal from the trainer
                runs.write_run(self._directory, dataclasses.replace(record, state=state))

    def _start(self, assignment: Assignment, lock: int, log: int) -> subprocess.Popen[bytes]:
        for line in assignment.header:
            _say(log, line)
        trainer = subprocess.Popen(
            assignment.argv,
            cwd=assignment.cwd,
            env=assignment.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(lock,),
            start_new_session=True,
            preexec_fn=_stop_with_parent,  # one thread here, so this is safe
        )
        self._trainer = trainer
        if self._asked:  # a signal came before there was anybody to pass it to
            trainer.send_signal(signal.Signals[self._asked[0]])
        return trainer

    def _record_start(self, pid: int, number: int) -> None:
        record = runs.read_run(self._directory) if self._directory is not None else None
        if self._directory is None or record is None:
            return
        log = self._directory / attempt_log(number)
        runs.write_run(
            self._directory,
            dataclasses.replace(
                record,
                state="started",
                supervisor=process.identify(os.getpid()),
                trainer=process.identify(pid),
                started_at=time.time(),
                attempt=number,
                log=str(log),
            ),
        )
        if number > 1:
            newest = Layout(self._directory.parents[1], self._directory.parents[1]).newest_log(record.variant)
            files.flip_link(newest, str(log))

    def _wait(self, trainer: subprocess.Popen[bytes]) -> int:
        # WNOWAIT keeps the zombie, and with it the group's number, until the rest of the group is ended:
        # a left-over worker would hold GPU memory.
        self._watch_cards(trainer.pid)
        os.waitid(os.P_PID, trainer.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(trainer.pid, signal.SIGKILL)
        return trainer.wait()

    def _watch_cards(self, pid: int) -> None:
        """Until the trainer ends: one reading of the cards each half minute. Without cards, just wait."""
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            while not poll.poll(gpu_log.EVERY_S * 1000):
                if self._directory is None or not gpu_log.append(self._directory):
                    poll.poll(10 * gpu_log.EVERY_S * 1000)  # none here, or none that answers: ask rarely
        finally:
            os.close(descriptor)

    def _ended(self, returncode: int, oom_before: int | None) -> ExitRecord:
        oom_after = process.oom_kills()
        kills = oom_after - oom_before if oom_after is not None and oom_before is not None else None
        died_of = None
        if returncode < 0:
            try:
                died_of = signal.Signals(-returncode).name
            except ValueError:
                died_of = f"signal {-returncode}"
        return ExitRecord(
            code=returncode if returncode >= 0 else None,
            signal=died_of,
            ended_at=time.time(),
            boot=process.boot(),
            oom_kills=kills,
            forwarded=tuple(self._asked[:1]),
        )


def _ending(end: ExitRecord) -> str:
    text = f"signal {end.signal}" if end.signal else f"exit code {end.code}"
    if end.forwarded:
        text += f", stopped on request ({end.forwarded[0]})"
    if end.oom_kills:
        text += f", {end.oom_kills} kernel OOM kills"
    return text


def _reserve(directory: Path) -> None:
    """Room for the exit record, taken while there is some: a full disk is a common reason to end."""
    with contextlib.suppress(OSError):
        (directory / RESERVE).write_bytes(os.urandom(RESERVED_BYTES))  # random, so that no file system packs it away


def _write_exit(directory: Path, end: ExitRecord) -> None:
    """The one record that must not be lost: it takes the reserved room, and keeps trying while the disk is full."""
    with contextlib.suppress(OSError):
        (directory / RESERVE).unlink()
    for _ in range(60):
        try:
            runs.write_exit(directory, end)
            return
        except FileNotFoundError:
            return  # somebody deleted the run: there is no place left for its record
        except OSError:
            time.sleep(1.0)


def _stop_with_parent() -> None:
    """In the trainer before exec: TERM when the supervisor dies, so that nothing trains unwatched."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _say(log: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(log, f"[dflash] {text}\n".encode())


@contextlib.contextmanager
def _viewer(log: Path) -> Iterator[None]:
    """The log on the pane's terminal, by a process of its own: a stuck terminal cannot hold the supervisor up."""
    tail = shutil.which("tail", path="/usr/bin:/bin")
    if tail is None or not sys.stdout.isatty():
        yield
        return
    shown = subprocess.Popen([tail, "-n", "+1", "-F", "--", str(log)], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        shown.terminate()
        shown.wait()
