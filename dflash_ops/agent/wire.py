"""The agent's protocol: what goes over stdin and what comes back on stdout.

Request: one line of JSON (`Request`), then `payload_size` bytes of payload.
Reply:   any number of progress, beat and data frames, then ONE answer frame. A frame is a line that starts with
         `@dflash:NONCE:`; a data frame is followed by exactly the number of bytes that it names. The nonce is the
         caller's, so neither a host's .bashrc nor a log that holds old frames can be taken for an answer. Bytes
         between frames are noise: kept for diagnosis, never parsed.

No answer frame means that the route failed, not the command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dflash_ops import errors

SCHEMA = 1
NOISE_KEPT = 4096
LINE_LIMIT = 64 << 20
"""Bytes one frame line may have; only an answer with a very long list comes near."""
NONCE = re.compile(r"[0-9a-f]{16,64}\Z")


class ProtocolError(Exception):
    """A peer that speaks another schema, or a malformed request."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the client asks. `params` are the verb's own fields (see `records`)."""

    nonce: str
    deadline_s: float
    root: str
    workspace: str
    params: dict[str, Any]
    payload_size: int = 0

    def encode(self) -> bytes:
        body = {
            "schema": SCHEMA,
            "nonce": self.nonce,
            "deadline_s": self.deadline_s,
            "root": self.root,
            "workspace": self.workspace,
            "params": self.params,
            "payload_size": self.payload_size,
        }
        return json.dumps(body, ensure_ascii=True).encode() + b"\n"

    @staticmethod
    def decode(line: bytes) -> Request:
        """Raises ProtocolError on anything but a whole request of this schema."""
        try:
            body = json.loads(line)
            if body["schema"] != SCHEMA:
                raise ProtocolError(f"schema {body['schema']}, this agent speaks {SCHEMA}")
            request = Request(
                nonce=str(body["nonce"]),
                deadline_s=float(body["deadline_s"]),
                root=str(body["root"]),
                workspace=str(body["workspace"]),
                params=dict(body["params"]),
                payload_size=int(body["payload_size"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"malformed request: {error!r}") from None
        if not NONCE.match(request.nonce) or not line.endswith(b"\n"):
            raise ProtocolError("malformed request: cut short, or a bad nonce")
        return request


@dataclass(frozen=True, slots=True)
class Progress:
    """A step on the way; `text` is for people."""

    text: str


@dataclass(frozen=True, slots=True)
class Beat:
    """Nothing new; the other side lives."""


@dataclass(frozen=True, slots=True)
class Data:
    """Raw bytes of the file with this inode, from this offset."""

    offset: int
    inode: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a call: a result, or an error with its exit code."""

    rc: int
    result: dict[str, Any] | None = None
    error: dict[str, str] | None = None

    def raise_error(self) -> None:
        """Raise the error that the agent reported, as the class it named."""
        if self.error is not None:
            raise error_from_json(self.error)


Event = Progress | Beat | Data | Answer


def error_to_json(error: errors.OpsError) -> dict[str, str]:
    return {"kind": type(error).__name__, "what": error.what, "why": error.why, "hint": error.hint}


def error_from_json(body: dict[str, str]) -> errors.OpsError:
    """The same error on this side; a kind this version does not know becomes AgentFailed."""
    found = getattr(errors, str(body.get("kind", "")), None)
    kind = found if isinstance(found, type) and issubclass(found, errors.OpsError) else errors.AgentFailed
    error = kind(str(body.get("what", "")), why=str(body.get("why", "")), hint=str(body.get("hint", "")))
    error.reported = True
    return error


def encode(event: Event, nonce: str) -> bytes:
    """One frame. It begins with a newline, so that noise without one cannot swallow it."""
    head = f"\n@dflash:{nonce}:"
    match event:
        case Progress(text):
            return f"{head}progress:{json.dumps(text)}\n".encode()
        case Beat():
            return f"{head}beat:\n".encode()
        case Data(offset, inode, payload):
            return f"{head}data:{offset}:{inode}:{len(payload)}\n".encode() + payload
        case Answer(rc, result, error):
            body: dict[str, Any] = {"schema": SCHEMA, "rc": rc}
            body |= {"error": error} if error is not None else {"result": result}
            return f"{head}answer:{json.dumps(body, ensure_ascii=True)}\n".encode()


class FrameReader:
    """Turns bytes, in whatever pieces they come, into events. The first answer ends the conversation.

    >>> reader = FrameReader("00ff00ff00ff00ff")
    >>> list(reader.feed(b"motd without newline" + encode(Beat(), "00ff00ff00ff00ff")))
    [Beat()]
    >>> reader.noise
    b'motd without newline'
    """

    def __init__(self, nonce: str) -> None:
        self._prefix = f"@dflash:{nonce}:".encode()
        self._pending = bytearray()
        self._scanned = 0
        self._data: tuple[int, int, int] | None = None
        self._noise = bytearray()
        self.answered = False

    @property
    def noise(self) -> bytes:
        """The last of what was not a frame."""
        return bytes(self._noise).strip(b"\n")

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The events that are complete with this piece; consume all before feeding more."""
        self._pending += piece
        while not self.answered:
            if self._data is not None:
                offset, inode, length = self._data
                if len(self._pending) < length:
                    return
                payload = bytes(self._pending[:length])
                del self._pending[:length]
                self._data = None
                yield Data(offset, inode, payload)
                continue
            newline = self._pending.find(b"\n", self._scanned)
            if newline < 0:
                self._scanned = len(self._pending)
                if self._scanned > NOISE_KEPT and not self._pending.startswith(self._prefix):
                    self._keep_noise(self._pending)
                    self._pending.clear()
                    self._scanned = 0
                elif self._scanned > LINE_LIMIT:
                    raise ProtocolError("a frame without end")
                return
            line = bytes(self._pending[:newline])
            del self._pending[: newline + 1]
            self._scanned = 0
            event = self._parse(line)
            if event is not None:
                yield event

    def _parse(self, line: bytes) -> Event | None:
        if not line.startswith(self._prefix):
            self._keep_noise(line + b"\n")
            return None
        kind, _, rest = line[len(self._prefix) :].partition(b":")
        try:
            match kind:
                case b"progress":
                    return Progress(str(json.loads(rest)))
                case b"beat":
                    return Beat()
                case b"data":
                    offset, inode, length = (int(field) for field in rest.split(b":"))
                    self._data = (offset, inode, length)
                    return None
                case b"answer":
                    body = json.loads(rest)
                    if body["schema"] != SCHEMA:
                        raise ProtocolError(f"the agent speaks schema {body['schema']}, this client {SCHEMA}")
                    self.answered = True
                    return Answer(int(body["rc"]), body.get("result"), body.get("error"))
        except (ValueError, KeyError, TypeError):
            pass
        self._keep_noise(line + b"\n")
        return None

    def _keep_noise(self, data: bytes | bytearray) -> None:
        self._noise += data
        del self._noise[:-NOISE_KEPT]
