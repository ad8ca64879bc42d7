"""How bytes reach a target: the one protocol that local, ssh and pct share.

A transport moves bytes and argv; it knows nothing of releases, runs or GPUs. Argv travels as a tuple and is
turned into shell text, where a shell is on the way, in one place (`render`). Every operation has a deadline.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from dflash_ops.errors import OpsError


@dataclass(frozen=True, slots=True)
class Completed:
    """A finished remote command. `returncode` is None where the route lost it (a dropped link)."""

    returncode: int | None
    stdout: bytes
    stderr: bytes


class ByteStream(Protocol):
    """A running remote command whose stdout is read as it comes."""

    def read(self, timeout: float) -> bytes | None:
        """The next bytes; b"" at the end; None when nothing came within `timeout` seconds."""

    def close(self) -> None:
        """End the remote command too; never blocks for more than a moment."""

    def end(self) -> Completed:
        """How it ended, once `read` gave b"": return code and the tail of stderr (stdout is empty)."""


class Transport(Protocol):
    """A way to run argv on a target. Errors are OpsError with the layer that failed."""

    def call(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        deadline: float,
        silence: float | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """Run to the end within `deadline` seconds, else DeadlineExceeded with the remote process ended.

        `silence` is for commands that give signs of life on stdout: DeadlineExceeded already when none came for that
        long. A deadline of an hour then costs no hour when the peer freezes.

        A command that ends without reading all of `stdin` is no error: what it said counts. With `on_stdout`
        the bytes go there as they come and `Completed.stdout` is empty.
        """

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> AbstractContextManager[ByteStream]:
        """Start and read as it runs; leaving the context ends the remote command."""

    def shell(self, argv: Sequence[str]) -> int:
        """Hand the operator's terminal to the command (attach); returns its exit code."""

    def route_argv(self, argv: Sequence[str], deadline: float) -> tuple[str, ...]:
        """What the first machine of the route really runs when `call` is asked for `argv`."""

    def explain(self, completed: Completed) -> OpsError:
        """Which layer failed, when the agent was called and left no framed answer; returned, not raised."""

    def host(self) -> Transport | None:
        """The machine that owns the GPUs where it is not the target itself (the Proxmox host), else None."""

    def close(self) -> None:
        """Let go of connections; harmless to call twice."""


def render(argv: Sequence[str]) -> str:
    """Argv as one line of shell text: the only place in dflash_ops where quoting happens.

    >>> render(["printf", "%s", "a b; reboot"])
    "printf %s 'a b; reboot'"
    """
    if not argv:
        raise ValueError("empty argv")
    for word in argv:
        if "\0" in word:
            raise ValueError(f"NUL in argument {word!r}")
    return shlex.join(argv)


def chunks(data: bytes | Iterable[bytes], size: int = 1 << 16) -> Iterator[bytes]:
    """`data` in pieces of at most `size` bytes."""
    pieces = [data] if isinstance(data, (bytes, bytearray)) else data
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), size):
            yield bytes(view[start : start + size])
