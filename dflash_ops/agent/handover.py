"""How the launch gives a run to its supervisor: over a socket, with the lock itself.

The supervisor may be a child of tmux or systemd, so it cannot inherit the locked descriptor. It is passed instead
(SCM_RIGHTS): the same open file, so there is no moment in which the lock is free. The trainer's environment goes the
same way and is never written to a disk or an argv, where secrets could be read.

The socket lives in Linux's abstract namespace: no file, no length limit by path, gone with its last owner. Both
ends check that the other is the same user.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

from dflash_ops.agent import records
from dflash_ops.errors import AgentFailed

LENGTH = struct.Struct("!Q")
LIMIT = 16 << 20


class HandoverBroken(AgentFailed):
    """The other side went away or is not who it should be."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """All that the supervisor needs to know."""

    directory: str
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    header: tuple[str, ...]
    """Lines that open the log."""
    keep_alive: int = 0
    """How many restarts by itself the operator allows."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The supervisor's answer: the trainer's pid, or why there is none."""

    trainer_pid: int | None
    error: str = ""


def listen(nonce: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    server.bind(_address(nonce))
    server.listen(1)
    return server


def give(server: socket.socket, assignment: Assignment, lock: int, timeout: float) -> Taken:
    """Wait for the supervisor, hand over, return its answer. HandoverBroken where none comes in time."""
    server.settimeout(timeout)
    try:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(timeout)
            _check_peer(connection)
            _send(connection, records.dump(assignment), [lock])
            body, _ = _receive(connection)
            return records.load(Taken, body)
    except (OSError, ValueError) as error:
        raise HandoverBroken(
            "the supervisor did not take over the run", why=str(error) or type(error).__name__
        ) from None


def take(nonce: str, timeout: float) -> tuple[socket.socket, Assignment, int]:
    """The supervisor's side: (connection to answer on, assignment, locked descriptor)."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.settimeout(timeout)
    connection.connect(_address(nonce))
    _check_peer(connection)
    body, descriptors = _receive(connection)
    if len(descriptors) != 1:
        raise HandoverBroken("the launch passed no lock")
    return connection, records.load(Assignment, body), descriptors[0]


def answer(connection: socket.socket, taken: Taken) -> None:
    """Tell the launch; it may be gone, which changes nothing for the run."""
    try:
        _send(connection, records.dump(taken), [])
    except OSError:
        pass
    finally:
        connection.close()


def _address(nonce: str) -> str:
    return f"\0dflash-launch-{nonce}"


def _check_peer(connection: socket.socket) -> None:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise HandoverBroken("another user answered on the launch socket", why=f"uid {uid}")


def _send(connection: socket.socket, body: dict[str, Any], descriptors: list[int]) -> None:
    data = json.dumps(body).encode()
    socket.send_fds(connection, [LENGTH.pack(len(data))], descriptors)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
    while 0 < len(head) < LENGTH.size:
        head += connection.recv(LENGTH.size - len(head)) or b""
    if len(head) != LENGTH.size:
        raise HandoverBroken("the other side of the launch went away")
    (length,) = LENGTH.unpack(head)
    if length > LIMIT:
        raise HandoverBroken("a launch message is too long")
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(min(1 << 16, length - len(data)))
        if not piece:
            raise HandoverBroken("the other side of the launch went away")
        data += piece
    return json.loads(data), descriptors
