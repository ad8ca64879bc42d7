"""Following a run's log from the operator's side: resume by offset after any drop, nothing lost, nothing twice."""

from __future__ import annotations

import codecs
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from dflash_ops.agent import records, wire
from dflash_ops.agent.follow import FollowEnd, FollowRequest
from dflash_ops.errors import AgentFailed, DeadlineExceeded, HostUnreachable, OpsError
from dflash_ops.remote import AgentMissing, Remote

BEAT_S = 2.0
SILENCE_S = 10.0
"""Without a byte or a beat for this long the connection counts as dead."""
PATIENCE_S = 600.0
"""How long to try to come back after a drop before giving up."""
BACKOFF_S = (0.2, 10.0)


@dataclass(frozen=True, slots=True)
class Sink:
    """Where the log goes: its bytes, and remarks about the connection."""

    write: Callable[[bytes], None]
    remark: Callable[[str], None]


def tail(remote: Remote, run_id: str, *, lines: int, follow: bool, sink: Sink) -> FollowEnd:
    """Send the log to the sink until the run has ended (or once, with follow=False); returns how it stands."""
    request = FollowRequest(run_id=run_id, lines=lines, follow=follow, beat_s=BEAT_S)
    lost_at: float | None = None
    wait = BACKOFF_S[0]
    ship = False

    def moved(data: wire.Data) -> None:
        nonlocal request, lost_at, wait
        sink.write(data.payload)
        request = replace(request, offset=data.offset + len(data.payload), inode=data.inode)
        lost_at, wait = None, BACKOFF_S[0]

    while True:
        try:
            return _once(remote, request, moved, sink, ship=ship)
        except AgentMissing:
            if ship:
                raise
            ship = True
        except (HostUnreachable, DeadlineExceeded, AgentFailed) as error:
            now = time.monotonic()
            if lost_at is None:
                lost_at = now
                sink.remark(f"connection lost ({error.what}); trying to come back")
            if now - lost_at > PATIENCE_S or not _temporary(error):
                raise
            time.sleep(wait * random.uniform(0.7, 1.3))  # many followers must not come back at once
            wait = min(BACKOFF_S[1], wait * 2)


def _once(
    remote: Remote, request: FollowRequest, moved: Callable[[wire.Data], None], sink: Sink, *, ship: bool
) -> FollowEnd:
    """One connection, until the answer or its loss."""
    with remote.stream("follow", request, ship=ship) as (stream, reader):
        for event in remote.events(stream, reader, lambda: SILENCE_S):
            match event:
                case wire.Data():
                    moved(event)
                case wire.Progress(text):
                    sink.remark(text)
                case wire.Answer():
                    return records.load(FollowEnd, event.result)
                case wire.Beat():
                    pass
    raise AgentFailed("the target stopped sending")


def _temporary(error: OpsError) -> bool:
    """Whether trying again can help. A key that is refused or an agent that cannot run will not mend itself."""
    return not error.reported and type(error) in (HostUnreachable, DeadlineExceeded, AgentFailed)


CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC, DCS, SOS, PM, APC: titles, clipboard
    r"|\x1b[ -/]*[0-~]"  # two-character and charset sequences
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]"  # what is left of C0 (not tab, newline, return) and C1
)
SUSPECT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]{0,4096}\x1b?|[ -/]*)?\Z|\r\Z")


class Cleaner:
    """Log bytes to safe text: UTF-8 across pieces, control sequences removed, carriage returns as new lines.

    A log can hold anything that a program printed; written raw it could retitle or rebind the operator's terminal.

    >>> cleaner = Cleaner()
    >>> cleaner.feed(b"50%\\r100%\\r") + cleaner.feed(b"\\n\\x1b[3") + cleaner.feed(b"1mred\\x1b[0m") + cleaner.end()
    '50%\\n100%\\nred'
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""

    def feed(self, piece: bytes) -> str:
        text = self._pending + self._decoder.decode(piece)
        if not SUSPECT.search(text):  # nearly always; several times faster than looking for whole sequences
            self._pending = ""
            return text
        cut = UNFINISHED.search(text)
        self._pending = text[cut.start() :] if cut else ""
        return _clean(text[: cut.start()] if cut else text)

    def end(self) -> str:
        """What was held back, at the end of the log."""
        text, self._pending = self._pending + self._decoder.decode(b"", final=True), ""
        return _clean(text)


def _clean(text: str) -> str:
    return CONTROL.sub("", text.replace("\r\n", "\n")).replace("\r", "\n")
