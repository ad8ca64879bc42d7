"""The operator's terminal handed to a remote command: raw keys out, bytes in, window size kept equal."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from types import FrameType

import paramiko

from dflash_ops.errors import HostUnreachable, UsageError
from dflash_ops.transport.link import Link

START_S = 30.0


def attach(link: Link, channel: paramiko.Channel, command: str) -> int:
    """Run `command` on a remote pseudo-terminal until it ends; its exit code.

    A peer that freezes is the operator's to leave: after Enter, `~.` as in OpenSSH cuts the connection.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("this needs a terminal", hint="run it from an interactive shell, not from a script or a pipe")
    size = shutil.get_terminal_size()
    try:
        with link.bounded(START_S):
            channel.get_pty(os.environ.get("TERM", "xterm"), size.columns, size.lines)
            channel.exec_command(command)
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise HostUnreachable(f"{link.label}: the connection was lost", why=str(error)) from None
    with _raw(sys.stdin.fileno()), _resizing(channel):
        left_by_escape = _relay(channel)
    if left_by_escape:
        link.cut()
        return 0
    if not channel.status_event.wait(2.0) or channel.exit_status < 0:
        raise HostUnreachable(f"{link.label}: the connection was lost", hint="attach again: what ran there still runs")
    return channel.exit_status


def _relay(channel: paramiko.Channel) -> bool:
    """Copy both ways until the command ends; True when the operator typed Enter ~ . instead."""
    keys, screen = sys.stdin.fileno(), sys.stdout.fileno()
    recent = b"\r"
    typed_ahead: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # In a thread: with the peer frozen and its window full a send blocks, and the escape must not.
    threading.Thread(target=_send, args=(channel, typed_ahead), daemon=True).start()
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(keys, selectors.EVENT_READ)
        while True:
            for ready, _ in selector.select():
                if ready.fileobj is channel:
                    piece = channel.recv(1 << 16)
                    if not piece:
                        return False
                    _write_all(screen, piece)
                    continue
                typed = os.read(keys, 1 << 12)
                recent = (recent + typed)[-3:]
                if recent.endswith((b"\r~.", b"\n~.")):
                    return True
                typed_ahead.put(typed)
                if not typed:
                    selector.unregister(keys)


def _send(channel: paramiko.Channel, typed_ahead: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        while typed := typed_ahead.get():
            channel.sendall(typed)
        channel.shutdown_write()


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


@contextlib.contextmanager
def _raw(file: int) -> Iterator[None]:
    before = termios.tcgetattr(file)
    try:
        tty.setraw(file)
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizing(channel: paramiko.Channel) -> Iterator[None]:
    def resize(_number: int, _frame: FrameType | None) -> None:
        size = shutil.get_terminal_size()
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            channel.resize_pty(size.columns, size.lines)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGWINCH, resize)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
