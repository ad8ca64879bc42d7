"""Calling the agent on a target: ship it once, ask, read the framed answer, name the layer that failed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from dflash_ops.agent import records, wire
from dflash_ops.bundle import agent_bundle
from dflash_ops.errors import AgentFailed, DeadlineExceeded, OpsError
from dflash_ops.transport.base import ByteStream, Transport, chunks

SILENCE_S = 30.0
"""The agent gives a sign of life every few seconds; after this long without one the peer is given up."""
GRACE_S = 15.0
"""What the route may take on top of the agent's own deadline: connect, ship the agent, carry the answer."""

ResultT = TypeVar("ResultT")

# Fixed text, run as `python -I -B -c LOADER zip sha256 nonce install_size verb`. It runs the shipped agent if that is
# there and whole; with install_size > 0 it first takes that many bytes from stdin, checks and stores them. The
# compiled twin (`agent.compiled`) runs in its place where that is whole too. It must parse with any Python 3, so that
# an old one is told apart from a broken route.
LOADER = """\
import hashlib, json, os, sys
path, digest, nonce, size = os.path.expanduser(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
def refuse(kind, what, why="", hint=""):
    error = {"kind": kind, "what": what, "why": why, "hint": hint}
    sys.stdout.write("\\n@dflash:%s:answer:%s\\n" % (nonce, json.dumps({"schema": 1, "rc": 14, "error": error})))
    sys.stdout.flush()
    os._exit(14)
if sys.version_info < (3, 11):
    refuse("AgentFailed", "Python %d.%d on the target is too old" % sys.version_info[:2], sys.executable,
           "set `python:` in hosts.yaml to a Python 3.11 or newer")
def whole(data):
    return hashlib.sha256(data).hexdigest() == digest
try:
    with open(path, "rb") as file:
        present = whole(file.read())
except OSError:
    present = False
if size:
    data = sys.stdin.buffer.read(size)
    if not whole(data):
        refuse("UploadCorrupt", "the agent arrived damaged", "%d of %d bytes" % (len(data), size))
    if not present:
        try:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            partial = path + "." + nonce
            with open(partial, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            refuse("EnvironmentUnfit", "the agent cannot be stored on the target", str(error),
                   "check `root:` in hosts.yaml, free space and permissions there")
elif not present:
    refuse("AgentMissing", path)
try:
    twin = path[:-3] + sys.implementation.cache_tag + ".pyz"
    with open(twin, "rb") as file:
        head = file.readline(80).decode()
        if head == "# %s\\n" % hashlib.sha256(file.read()).hexdigest():
            path = twin
except (OSError, ValueError):
    pass
sys.path.insert(0, path)
sys.argv = [path] + sys.argv[5:]
import runpy
runpy.run_module("dflash_ops.agent", run_name="__main__", alter_sys=True)
"""


class AgentMissing(AgentFailed):
    """This version of the agent is not on the target yet; it is shipped with the next call."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where things are on the target. `root` and `workspace` are absolute or begin with `~/`."""

    python: str
    root: str
    workspace: str


class Remote:
    """One target's agent, over one transport."""

    def __init__(self, transport: Transport, place: Place) -> None:
        self.transport = transport
        self.place = place

    def call(
        self,
        verb: str,
        params: Any,
        result: type[ResultT],
        *,
        deadline: float,
        payload: bytes = b"",
        on_progress: Callable[[str], None] | None = None,
        on_sent: Callable[[int], None] | None = None,
    ) -> ResultT:
        """Run one verb to its end. `params` and `result` are records; errors come back as the class they left as.

        `on_sent` is told how many bytes of the payload have left, as they leave.
        """
        counted = Counted(payload, on_sent) if on_sent is not None else [payload]
        try:
            answer = self._exchange(verb, params, deadline, counted, len(payload), b"", on_progress)
        except AgentMissing:
            install = agent_bundle().data
            answer = self._exchange(verb, params, deadline, counted, len(payload), install, on_progress)
        try:
            return records.load(result, answer.result)
        except ValueError as error:
            raise AgentFailed(f"the agent's answer to {verb!r} cannot be read", why=str(error)) from None

    def _exchange(
        self,
        verb: str,
        params: Any,
        deadline: float,
        payload: Iterable[bytes],
        payload_size: int,
        install: bytes,
        on_progress: Callable[[str], None] | None,
    ) -> wire.Answer:
        nonce = secrets.token_hex(16)
        reader = wire.FrameReader(nonce)
        answers: list[wire.Answer] = []

        def on_stdout(piece: bytes) -> None:
            for event in reader.feed(piece):
                if isinstance(event, wire.Progress) and on_progress is not None:
                    on_progress(event.text)
                elif isinstance(event, wire.Answer):
                    answers.append(event)

        request = self._request(nonce, params, deadline, payload_size)
        completed = self.transport.call(
            self.argv(verb, nonce, len(install)),
            stdin=Joined((install, request.encode()), payload),
            deadline=deadline + GRACE_S,
            silence=SILENCE_S,
            on_stdout=on_stdout,
        )
        if not answers:
            raise with_noise(self.transport.explain(completed), reader.noise)
        raise_agent_error(answers[0])
        return answers[0]

    @contextmanager
    def stream(self, verb: str, params: Any, *, ship: bool = False) -> Iterator[tuple[ByteStream, wire.FrameReader]]:
        """Start a verb that goes on talking; `events` reads what it says.

        `ship` sends the agent along: for the second try, after AgentMissing.
        """
        nonce = secrets.token_hex(16)
        request = self._request(nonce, params, 0.0, 0)
        install = agent_bundle().data if ship else b""
        argv = self.argv(verb, nonce, len(install))
        with self.transport.stream(argv, stdin=install + request.encode()) as stream:
            yield stream, wire.FrameReader(nonce)

    def events(
        self, stream: ByteStream, reader: wire.FrameReader, silence: Callable[[], float]
    ) -> Iterator[wire.Event]:
        """What a streaming verb says, up to its answer; raises what the agent reported, and a loss of the route.

        `silence` gives the seconds without a byte after which the connection counts as dead. The stream stays the
        caller's: leaving its context ends the verb.
        """
        while True:
            patience = silence()
            piece = stream.read(patience)
            if piece is None:
                raise DeadlineExceeded(f"nothing came for {patience:.0f} s")
            if piece == b"":
                raise with_noise(self.transport.explain(stream.end()), reader.noise)
            for event in reader.feed(piece):
                if isinstance(event, wire.Answer):
                    raise_agent_error(event)
                yield event

    def route_argv(self, verb: str, deadline: float) -> tuple[str, ...]:
        """What the first machine of the route runs for this verb, agent in place; the nonce is an example."""
        return self.transport.route_argv(self.argv(verb, "0" * 32, 0), deadline + GRACE_S)

    def argv(self, verb: str, nonce: str, install_size: int) -> tuple[str, ...]:
        """The exact command that runs on the target."""
        digest = agent_bundle().sha256
        path = f"{self.place.root}/agents/{digest}.pyz"
        return (self.place.python, "-I", "-B", "-c", LOADER, path, digest, nonce, str(install_size), verb)

    def _request(self, nonce: str, params: Any, deadline: float, payload_size: int) -> wire.Request:
        return wire.Request(
            nonce=nonce,
            deadline_s=deadline,
            root=self.place.root,
            workspace=self.place.workspace,
            params=records.dump(params),
            payload_size=payload_size,
        )


@dataclass(frozen=True, slots=True)
class Joined:
    """Pieces of stdin, one after the other. It can be iterated again: a route may have to send it twice."""

    head: tuple[bytes, ...]
    rest: Iterable[bytes]

    def __iter__(self) -> Iterator[bytes]:
        yield from self.head
        yield from self.rest


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes that say how many of them have been taken; counting starts anew with each iteration."""

    data: bytes
    on_sent: Callable[[int], None]

    def __iter__(self) -> Iterator[bytes]:
        self.on_sent(0)
        sent = 0
        for piece in chunks(self.data):
            yield piece
            sent += len(piece)
            self.on_sent(sent)


def raise_agent_error(answer: wire.Answer) -> None:
    """Raise what the agent reported, if it reported an error."""
    if answer.error is not None and answer.error.get("kind") == AgentMissing.__name__:
        raise AgentMissing(answer.error.get("what", ""))
    answer.raise_error()


def with_noise(error: OpsError, noise: bytes) -> OpsError:
    """The same error, with the last line of what came instead of an answer."""
    last = noise.decode("utf-8", "replace").strip().splitlines()[-1:] if noise else []
    if last and not error.why:
        error.why = f"it said: {last[0][:300]}"
    return error
