"""TensorBoard on the target, for as long as somebody on the laptop looks at it, reached by single HTTP exchanges.

The container's ports are not reachable from the laptop, and often not from its host either; the agent's own route
is. So the laptop serves a port of its own and carries each request through a call.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.agent import runs, trainer_cli
from dflash_ops.agent.layout import Layout
from dflash_ops.agent.wire import Beat, Data, Event, Progress
from dflash_ops.errors import AgentFailed, EnvironmentUnfit, UsageError

START_S = 90.0
BEAT_S = 2.0
EXCHANGE_S = 60.0
REQUEST_LIMIT = 1 << 20
RESPONSE_LIMIT = 256 << 20
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class BoardRequest:
    """`run_id` empty: every run under the workspace, side by side."""

    run_id: str = ""


@dataclass(frozen=True, slots=True)
class BoardEnd:
    """The viewer has gone, or TensorBoard has ended."""

    code: int | None


@dataclass(frozen=True, slots=True)
class ExchangeRequest:
    """One HTTP request, raw, in base64; to a port on this machine's loopback only."""

    port: int
    raw: str


@dataclass(frozen=True, slots=True)
class ExchangeEnd:
    size: int


def serve(layout: Layout, request: BoardRequest, emit: Callable[[Event], bool]) -> BoardEnd:
    """Start TensorBoard, say its port, and end it when nobody listens any more."""
    try:
        importlib.metadata.version("tensorboard")
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentUnfit("tensorboard is not installed on the target", hint="`fab provision`") from None
    directory = layout.runs
    if request.run_id:
        status = runs.find(layout, request.run_id)
        directory = Path(status.directory) if status is not None else directory
    port = _free_port()
    words = [sys.executable, "-m", "tensorboard.main", "--logdir", str(directory), "--host", "127.0.0.1"]
    with subprocess.Popen(
        [*words, "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=trainer_cli.environment({}),
        cwd="/",
        start_new_session=True,
        preexec_fn=_end_with_parent,
    ) as child:
        try:
            ends_at = time.monotonic() + START_S
            while not _listens(port):
                if child.poll() is not None or time.monotonic() > ends_at:
                    raise AgentFailed("TensorBoard did not start", why=f"exit code {child.poll()}")
                if not emit(Beat()):
                    return BoardEnd(None)
                time.sleep(0.5)
            emit(Progress(str(port)))
            while child.poll() is None and emit(Beat()):
                time.sleep(BEAT_S)
            return BoardEnd(child.poll())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def exchange(request: ExchangeRequest, emit: Callable[[Event], bool]) -> ExchangeEnd:
    """Carry one request to the loopback port and send back what it answers, byte for byte."""
    raw = base64.b64decode(request.raw)
    if not 1024 <= request.port <= 65535 or len(raw) > REQUEST_LIMIT:
        raise UsageError("no such exchange")
    size = 0
    try:
        with socket.create_connection(("127.0.0.1", request.port), timeout=EXCHANGE_S) as peer:
            peer.sendall(raw)
            while size < RESPONSE_LIMIT and (piece := peer.recv(1 << 18)):
                if not emit(Data(size, 0, piece)):
                    break
                size += len(piece)
    except OSError as error:
        raise AgentFailed("TensorBoard does not answer", why=str(error)) from None
    return ExchangeEnd(size)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def _end_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
