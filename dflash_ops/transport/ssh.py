"""A target reached by plain SSH: commands over raw Paramiko channels.

Fabric's own `run` is not used for bytes: its stdin path is slow and alters binary data, and its capture takes time
quadratic in the output. A channel here moves bytes both ways at the speed of the connection, each wait has a limit,
and an exit status that was lost (a dropped connection, a death by signal) is None and never a number.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import paramiko

from dflash_ops.errors import AgentFailed, DeadlineExceeded, HostUnreachable, OpsError
from dflash_ops.settings import Ssh
from dflash_ops.transport import terminal
from dflash_ops.transport.base import Completed, Transport, chunks, render
from dflash_ops.transport.link import Link

STDERR_KEPT = 1 << 16
READ_SIZE = 1 << 18
STREAM_START_S = 30.0
NOT_FOUND = re.compile(r"(?:failed to run command|env:) ['‘]([^'’]*)['’]:? (.*)")


class SshTransport:
    """Runs argv on a host."""

    def __init__(self, ssh: Ssh) -> None:
        self.link = Link(ssh)

    def call(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        deadline: float,
        silence: float | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """See `Transport.call`."""
        limited_argv = self.route_argv(argv, deadline)
        return self.execute(limited_argv, stdin=stdin, deadline=deadline, silence=silence, on_stdout=on_stdout)

    def execute(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes],
        deadline: float,
        silence: float | None = None,
        on_stdout: Callable[[bytes], None] | None,
    ) -> Completed:
        """`call` for a command that limits itself."""
        ends_at = time.monotonic() + deadline
        stdout: list[bytes] = []
        sink = on_stdout or stdout.append
        with self._started(argv, stdin, ends_at, hold=False) as command:
            patience = deadline if silence is None else silence
            while piece := command.read(min(patience, ends_at - time.monotonic())):
                sink(piece)
            if piece is None or not command.wait(min(ends_at, time.monotonic() + patience)):
                self.link.cut()  # it may be frozen: nothing may wait on it again
                if time.monotonic() < ends_at:
                    raise DeadlineExceeded(f"{self.link.label}: no sign of life for {patience:.0f} s")
                raise DeadlineExceeded(f"{self.link.label}: no answer within {deadline:.0f} s")
            completed = command.end()
        return Completed(completed.returncode, b"".join(stdout), completed.stderr)

    @contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[SshStream]:
        """See `Transport.stream`. stdin stays open: its end tells the command that nobody listens any more."""
        with self._started(argv, stdin, time.monotonic() + STREAM_START_S, hold=True) as command:
            yield command

    @contextmanager
    def _started(
        self, argv: Sequence[str], stdin: bytes | Iterable[bytes], ends_at: float, *, hold: bool
    ) -> Iterator[SshStream]:
        line = render(argv)
        with self.link.channel(ends_at) as channel:
            try:
                with self.link.bounded(ends_at - time.monotonic()):
                    channel.exec_command(line)
            except (paramiko.SSHException, EOFError, OSError) as error:
                if time.monotonic() >= ends_at:
                    raise DeadlineExceeded(f"{self.link.label}: the host does not answer") from None
                raise HostUnreachable(f"{self.link.label}: the connection was lost", why=str(error)) from None
            with contextlib.closing(SshStream(self.link, channel)) as command:
                command.feed(stdin, hold=hold)
                yield command

    def shell(self, argv: Sequence[str]) -> int:
        """See `Transport.shell`."""
        with self.link.channel(time.monotonic() + STREAM_START_S) as channel:
            return terminal.attach(self.link, channel, render(argv))

    def route_argv(self, argv: Sequence[str], deadline: float) -> tuple[str, ...]:
        """See `Transport.route_argv`: a time limit of its own, for closing a channel does not end what runs there."""
        return limited(argv, deadline)

    def explain(self, completed: Completed) -> OpsError:
        """See `Transport.explain`."""
        text = completed.stderr.decode("utf-8", "replace").strip()
        last = text.splitlines()[-1][:300] if text else ""
        if completed.returncode is None:
            if not self.link.alive:
                return HostUnreachable(f"{self.link.label}: the connection was lost while the command ran", why=last)
            return AgentFailed("the agent was killed before it answered", why=last)
        absent = NOT_FOUND.search(text)
        if completed.returncode in (126, 127) and absent:
            return AgentFailed(f"cannot run {absent[1]} on the target", why=absent[2])
        if completed.returncode in (124, 137) and not text:
            return DeadlineExceeded("the agent did not answer and was ended by its time limit")
        return AgentFailed(f"the agent gave no answer (exit code {completed.returncode})", why=last)

    def host(self) -> Transport | None:
        """See `Transport.host`: the GPUs are this host's own."""
        return None

    def close(self) -> None:
        """See `Transport.close`."""
        self.link.close()


class SshStream:
    """A command on a channel: stdin is fed by a thread, stdout and stderr are read by the caller's."""

    def __init__(self, link: Link, channel: paramiko.Channel) -> None:
        self._link = link
        self._channel = channel
        self._stderr = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._wake = os.pipe()  # from the feeder to a reader that waits on the channel
        self._selector.register(self._wake[0], selectors.EVENT_READ)
        self._feeder: threading.Thread | None = None
        self._feed_error: BaseException | None = None

    def feed(self, stdin: bytes | Iterable[bytes], *, hold: bool) -> None:
        """Send `stdin` from a thread of its own, then end it unless `hold`."""

        def work() -> None:
            pieces = chunks(stdin)
            while True:
                try:
                    piece = next(pieces, b"")
                except BaseException as error:  # noqa: BLE001  # the caller's own iterator failed: raised from read
                    self._feed_error = error
                    os.write(self._wake[1], b"!")
                    return
                try:
                    if piece:
                        self._channel.sendall(piece)
                        continue
                    if not hold:
                        self._channel.shutdown_write()
                except (OSError, EOFError, paramiko.SSHException):
                    pass  # the command ended without reading all of it, or the link is gone: the reader sees which
                return

        self._feeder = threading.Thread(target=work, daemon=True)
        self._feeder.start()

    def read(self, timeout: float) -> bytes | None:
        """See `ByteStream.read`."""
        ends_at = time.monotonic() + timeout
        while True:
            ended = self._channel.eof_received or self._channel.closed  # before the buffers: they fill first
            while self._channel.recv_stderr_ready():
                self._stderr += self._channel.recv_stderr(READ_SIZE)
                del self._stderr[:-STDERR_KEPT]
            if self._channel.recv_ready():
                return self._channel.recv(READ_SIZE)
            if self._feed_error is not None:
                raise self._feed_error
            if ended:
                return b""
            left = ends_at - time.monotonic()
            if left <= 0:
                return None
            self._selector.select(left)

    def wait(self, ends_at: float) -> bool:
        """Wait for the exit status; False when it does not come in time."""
        return self._channel.status_event.wait(max(0.0, ends_at - time.monotonic()))

    def end(self) -> Completed:
        """See `ByteStream.end`."""
        self.wait(time.monotonic() + 1.0)
        status = self._channel.exit_status
        return Completed(status if status >= 0 else None, b"", bytes(self._stderr))

    def close(self) -> None:
        """See `ByteStream.close`. The command notices by its stdin's end or at its next write."""
        self._selector.close()
        with self._link.bounded(1.0), contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()
        if self._feeder is not None:
            self._feeder.join(1.0)
        if (
            self._feeder is None or not self._feeder.is_alive()
        ):  # a feeder that hangs in the caller's iterator keeps them
            for end in self._wake:
                os.close(end)


def limited(argv: Sequence[str], seconds: float) -> tuple[str, ...]:
    """The command under a time limit of its own: closing a channel does not end what runs at the other end."""
    return ("/usr/bin/timeout", "-k", "5", str(math.ceil(seconds) + 1), *argv)
