"""This machine as a target: the agent is a subprocess with a clean environment, in a session of its own.

The session keeps Ctrl-C, which the terminal sends to the whole foreground group, away from what runs "there".
"""

from __future__ import annotations

import contextlib
import os
import pwd
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from dflash_ops.errors import AgentFailed, DeadlineExceeded, OpsError
from dflash_ops.transport.base import Completed, Transport, chunks

STDERR_KEPT = 1 << 16
READ_SIZE = 1 << 18


def clean_environment() -> dict[str, str]:
    """What a program gets here: nothing of the operator's shell but who and where they are."""
    user = pwd.getpwuid(os.getuid())
    return {
        "HOME": os.environ.get("HOME") or user.pw_dir,
        "USER": user.pw_name,
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "TERM": os.environ.get("TERM") or "dumb",
    }


class LocalTransport:
    """Runs argv as a subprocess."""

    def call(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        deadline: float,
        silence: float | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """See `Transport.call`. A negative return code is a signal, as in subprocess."""
        ends_at = time.monotonic() + deadline
        patience = deadline if silence is None else silence
        heard = time.monotonic()
        stdout: list[bytes] = []
        stderr = bytearray()
        sink = on_stdout or stdout.append
        with _started(argv) as process, selectors.DefaultSelector() as selector:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            pieces = chunks(stdin)
            waiting = memoryview(b"")
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stderr, selectors.EVENT_READ)
            while process.stdout in _open(selector) or process.stderr in _open(selector):
                now = time.monotonic()
                left = min(ends_at, heard + patience) - now
                if left <= 0:
                    said = f"no answer within {deadline:.0f} s"
                    if now < ends_at:
                        said = f"no sign of life for {patience:.0f} s"
                    raise DeadlineExceeded(said, why=f"{argv[0]} still ran; it was ended")
                for key, _ in selector.select(left):
                    if key.fileobj is process.stdin:
                        try:
                            waiting = waiting or memoryview(next(pieces, b""))
                            if waiting:
                                waiting = waiting[os.write(process.stdin.fileno(), waiting) :]
                            else:
                                _drop(selector, process.stdin)
                        except BlockingIOError:
                            continue
                        except BrokenPipeError:
                            _drop(selector, process.stdin)
                        continue
                    piece = os.read(key.fd, READ_SIZE)
                    if not piece:
                        _drop(selector, key.fileobj)
                    elif key.fileobj is process.stdout:
                        heard = time.monotonic()
                        sink(piece)
                    else:
                        stderr += piece
                        del stderr[:-STDERR_KEPT]
            try:
                process.wait(max(0.0, ends_at - time.monotonic()) + 1.0)
            except subprocess.TimeoutExpired:
                raise DeadlineExceeded(f"{argv[0]} closed its output and did not end") from None
            return Completed(process.returncode, b"".join(stdout), bytes(stderr))

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[LocalStream]:
        """See `Transport.stream`."""
        with _started(argv) as process:
            assert process.stdin
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(stdin)
                process.stdin.close()
            yield LocalStream(process)

    def shell(self, argv: Sequence[str]) -> int:
        """See `Transport.shell`."""
        try:
            return subprocess.call(list(argv), env=clean_environment())
        except OSError as error:
            raise AgentFailed(f"cannot run {argv[0]}", why=str(error)) from None

    def route_argv(self, argv: Sequence[str], deadline: float) -> tuple[str, ...]:
        """See `Transport.route_argv`: nothing is added here."""
        return tuple(argv)

    def explain(self, completed: Completed) -> OpsError:
        """See `Transport.explain`: the only layer here is the command itself."""
        last = completed.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        killed = completed.returncode is not None and completed.returncode < 0
        ending = (
            f"killed by signal {-completed.returncode}"
            if killed and completed.returncode is not None
            else f"exit code {completed.returncode}"
        )
        hint = "somebody or the kernel (memory?) ended it; try again" if killed else ""
        return AgentFailed(f"the agent gave no answer ({ending})", why=last[0] if last else "", hint=hint)

    def host(self) -> Transport | None:
        """See `Transport.host`: the GPUs are this machine's own."""
        return None

    def close(self) -> None:
        """See `Transport.close`."""


class LocalStream:
    """A running subprocess, read as it talks."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._stderr = bytearray()
        self._selector = selectors.DefaultSelector()
        assert process.stdout is not None
        assert process.stderr is not None
        self._selector.register(process.stdout, selectors.EVENT_READ)
        self._selector.register(process.stderr, selectors.EVENT_READ)

    def read(self, timeout: float) -> bytes | None:
        """See `ByteStream.read`."""
        ends_at = time.monotonic() + timeout
        while self._process.stdout in _open(self._selector):
            ready = self._selector.select(max(0.0, ends_at - time.monotonic()))
            for key, _ in ready:
                piece = os.read(key.fd, READ_SIZE)
                if not piece:
                    self._selector.unregister(key.fileobj)
                elif key.fileobj is self._process.stdout:
                    return piece
                else:
                    self._stderr += piece
                    del self._stderr[:-STDERR_KEPT]
            if not ready and time.monotonic() >= ends_at:
                return None
        return b""

    def close(self) -> None:
        """See `ByteStream.close`."""
        _end(self._process)
        self._selector.close()

    def end(self) -> Completed:
        """See `ByteStream.end`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return Completed(self._process.returncode, b"", bytes(self._stderr))


@contextmanager
def _started(argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(),
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise AgentFailed(f"cannot run {argv[0]}", why=str(error)) from None
    try:
        yield process
    finally:
        _end(process)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _open(selector: selectors.BaseSelector) -> list[object]:
    return [key.fileobj for key in selector.get_map().values()]


def _drop(selector: selectors.BaseSelector, pipe: object) -> None:
    selector.unregister(pipe)  # type: ignore[arg-type]  # only pipes that were registered come here
    pipe.close()  # type: ignore[attr-defined]  # a pipe
