"""The agent's entry: one verb, one answer.

    python -I -B AGENT.pyz VERB < request

Standard output carries frames only: the real one is set aside at once and file descriptor 1 leads to standard
error, so that no library can print into the protocol.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from dflash_ops.agent import compiled, files, records, retire, supervise, verbs, wire
from dflash_ops.agent.layout import Layout
from dflash_ops.agent.wire import Answer, Beat, Request
from dflash_ops.errors import AgentFailed, DeadlineExceeded, OpsError

LAST_RESORT_S = 5.0
"""After this much over the deadline the process ends without a word."""
TIDY_S = 20.0
"""A disk that does not answer must not hold up a caller who has the answer."""
REQUEST_LIMIT = 16 << 20
BEAT_S = 3.0
"""Between two signs of life while a verb works; the caller gives up long after several are missing."""


class Frames:
    """Writes frames and says whether the caller still listens; one that has gone is no reason to stop a launch."""

    def __init__(self, descriptor: int, nonce: str) -> None:
        self._descriptor = descriptor
        self._nonce = nonce
        self._lock = threading.Lock()
        self._broken = False

    def __call__(self, event: wire.Event) -> bool:
        data = memoryview(wire.encode(event, self._nonce))
        with self._lock:
            try:
                while data and not self._broken:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                self._broken = True
            return not self._broken


def main() -> None:
    """Run the verb in argv; the exit code repeats the answer's."""
    if sys.argv[1:2] == ["supervise"] and len(sys.argv) == 4:
        os._exit(supervise.Supervisor().run(sys.argv[2]))
    stdout = os.dup(1)
    os.dup2(2, 1)
    os.set_inheritable(stdout, False)
    os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the caller's connection may drop in the middle of a launch
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    stdin = sys.stdin.buffer
    try:
        request = Request.decode(stdin.readline(REQUEST_LIMIT))
    except wire.ProtocolError as error:
        print(f"dflash agent: {error}", file=sys.stderr)
        sys.exit(14)
    frames = Frames(stdout, request.nonce)
    threading.Thread(target=_beat, args=(frames,), name="beat", daemon=True).start()
    answer = _answer(sys.argv[1] if len(sys.argv) > 1 else "", request, stdin, frames)
    faulthandler.cancel_dump_traceback_later()
    frames(answer)
    _tidy(Path(__file__).parents[2])
    os._exit(answer.rc)  # no thread, pipe or atexit of a library can hold the answer up


def _tidy(running: Path) -> None:
    """After the answer, on whichever machine this is: what later calls need, and what nobody does. Mostly nothing."""
    faulthandler.dump_traceback_later(TIDY_S, exit=True, file=sys.stderr)
    compiled.write(running)
    if running.suffix == ".pyz":
        with contextlib.suppress(OSError):
            retire.agents(running.parent, running)


def _beat(frames: Frames) -> None:
    while frames(Beat()):
        time.sleep(BEAT_S)


def _answer(verb: str, request: Request, stdin: BinaryIO, frames: Frames) -> Answer:
    run: Callable[[verbs.Call], Any] | None = verbs.VERBS.get(verb)
    try:
        if run is None:
            raise AgentFailed(f"the agent has no verb {verb!r}")
        with _deadline(request.deadline_s):
            layout = Layout(Path(request.root).expanduser(), Path(request.workspace).expanduser())
            done = run(verbs.Call(layout, request.params, stdin, request.payload_size, frames))
            return Answer(0, records.dump(done))
    except OpsError as error:
        return Answer(error.exit_code, error=wire.error_to_json(error))
    except OSError as error:
        if error.errno not in files.DISK_ERRORS:
            return _bug(verb, error)
        unfit = files.disk_error(error, f"answering {verb!r}")
        return Answer(unfit.exit_code, error=wire.error_to_json(unfit))
    except Exception as error:  # noqa: BLE001  # the last line of defence: a bug must be told through the protocol too
        return _bug(verb, error)


def _bug(verb: str, error: Exception) -> Answer:
    import traceback

    traceback.print_exception(error)
    failed = AgentFailed(
        f"the agent failed in {verb!r}",
        why=f"{type(error).__name__}: {error}",
        hint="this is a bug: please report it",
    )
    return Answer(failed.exit_code, error=wire.error_to_json(failed))


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """DeadlineExceeded in the main thread after `seconds`; 0 means none. A hang in C code ends the process."""
    if seconds <= 0:
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise DeadlineExceeded(f"the agent did not finish within {seconds:.0f} s")

    signal.signal(signal.SIGALRM, expire)
    faulthandler.dump_traceback_later(seconds + LAST_RESORT_S, exit=True, file=sys.stderr)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
