"""A run's files to the laptop: verified by hash, resumed after any cut, nothing trusted that the target names.

A file gets its name here only when its hash is the one that the target gave for it; until then it is `.NAME.part`,
and the next pull goes on at its end.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.agent import records, wire
from dflash_ops.agent.fetch import PART, FetchEnd, FetchRequest, ListedFile, Listing, ListRequest
from dflash_ops.errors import AgentFailed, DeadlineExceeded, HostUnreachable, UploadCorrupt, UsageError
from dflash_ops.remote import Remote

LIST_DEADLINE_S = 3600.0
"""The target reads every byte once to give its hash."""
SILENCE_S = 15.0
PATIENCE_S = 600.0
BACKOFF_S = (0.2, 10.0)
CHECKPOINTS = ("all", "newest", "none")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull did. `moved` is the number of bytes that came over."""

    run_id: str
    directory: Path
    files: int
    unchanged: int
    moved: int


def pull(remote: Remote, run_id: str, into: Path, checkpoints: str, say: Say) -> Pulled:
    """Bring a run's files to `into`/RUN_ID. Raises UploadCorrupt where a file stays wrong after a second try."""
    if checkpoints not in CHECKPOINTS:
        raise UsageError(f"--checkpoints {checkpoints!r}: choose one of {', '.join(CHECKPOINTS)}")
    found = list_files(remote, run_id, checkpoints, say)
    run = found.run.run_id
    directory = into / run
    _refuse_clashes(found.files)
    moved = unchanged = 0
    for file in found.files:
        path = _place(directory, file.path)
        if _digest(path, file.size) == file.sha256:
            unchanged += 1
            continue
        say(f"{file.path}: {file.size:,} bytes")
        moved += _bring(remote, run, file, path, say)
    manifest = {"run": run, "files": [records.dump(file) for file in found.files]}
    _write_private(directory, "pull.json", json.dumps(manifest, indent=1).encode() + b"\n")
    return Pulled(run, directory, len(found.files), unchanged, moved)


def list_files(remote: Remote, run_id: str, checkpoints: str, say: Say) -> Listing:
    """The target's list of a run's files with their hashes."""
    request = ListRequest(run_id, checkpoints)
    return remote.call("files", request, Listing, deadline=LIST_DEADLINE_S, on_progress=say)


def read_whole(remote: Remote, run_id: str, path: str, limit: int) -> bytes:
    """One file of a run as it is now, its first `limit` bytes; empty where there is none."""
    pieces: list[bytes] = []
    try:
        _stream(remote, FetchRequest(run_id, path, 0, limit), lambda data: pieces.append(data.payload))
    except UsageError:
        return b""
    return b"".join(pieces)


def _bring(remote: Remote, run: str, file: ListedFile, path: Path, say: Say) -> int:
    """One file, once more from the start where the first try ends with a wrong hash; returns the bytes moved."""
    partial = path.with_name(f".{path.name}.part")
    _private_directory(path.parent)
    moved = 0
    for attempt in (1, 2):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(partial, flags, 0o600)
        with os.fdopen(descriptor, "r+b") as out:
            held = out.seek(0, os.SEEK_END)
            if held > file.size:
                out.truncate(0)
                held = 0
            out.seek(held)
            moved += _fill(remote, FetchRequest(run, file.path, held, file.size), out.write, say)
            out.flush()
            os.fsync(out.fileno())
        if _digest(partial, file.size) == file.sha256:
            partial.replace(path)
            return moved
        partial.unlink()
        if attempt == 1:
            say(f"{file.path}: what was held does not match, starting again")
    raise UploadCorrupt(f"{file.path} arrived altered", why="its sha256 is wrong after a second try", hint="pull again")


def _fill(remote: Remote, request: FetchRequest, write: Callable[[bytes], int], say: Say) -> int:
    """Fetch a stretch, coming back after every cut; returns the bytes that were written."""
    position, lost_at, wait = request.offset, None, BACKOFF_S[0]

    def keep(data: wire.Data) -> None:
        nonlocal position, lost_at, wait
        if data.offset != position:
            raise AgentFailed("the target sent another stretch than the one asked for")
        write(data.payload)
        position += len(data.payload)
        lost_at, wait = None, BACKOFF_S[0]

    while position < request.size:
        asked = FetchRequest(request.run_id, request.path, position, request.size)
        try:
            end = _stream(remote, asked, keep)
        except (HostUnreachable, DeadlineExceeded, AgentFailed) as error:
            now = time.monotonic()
            if lost_at is None:
                lost_at = now
                say(f"connection lost ({error.what}); trying to come back")
            if now - lost_at > PATIENCE_S or type(error) not in (HostUnreachable, DeadlineExceeded, AgentFailed):
                raise
            time.sleep(wait * random.uniform(0.7, 1.3))
            wait = min(BACKOFF_S[1], wait * 2)
            continue
        if end.size < request.size:
            break  # the file is shorter now than when it was listed: the hash will tell
    return position - request.offset


def _stream(remote: Remote, request: FetchRequest, keep: Callable[[wire.Data], None]) -> FetchEnd:
    with remote.stream("fetch", request) as (stream, reader):
        for event in remote.events(stream, reader, lambda: SILENCE_S):
            if isinstance(event, wire.Data):
                keep(event)
            elif isinstance(event, wire.Answer):
                return records.load(FetchEnd, event.result)
    raise AgentFailed("the target stopped sending")


def _place(directory: Path, name: str) -> Path:
    """Where a listed file goes; UploadCorrupt where its name, or a link on the way, would lead elsewhere."""
    parts = name.split("/")
    if not parts or not all(PART.match(part) for part in parts):
        raise UploadCorrupt(f"the target lists an unsafe name: {name!r}", hint="look at the target before going on")
    path = directory
    for part in parts:
        if path.is_symlink():
            raise UsageError(f"{path} is a link", hint="remove it, or pull into another directory")
        path = path / part
    if path.is_symlink() or path.is_dir():
        raise UsageError(f"{path} is in the way", hint="remove it, or pull into another directory")
    return path


def _refuse_clashes(files: tuple[ListedFile, ...]) -> None:
    """Two names that a case-folding file system takes for one would overwrite each other."""
    seen: dict[str, str] = {}
    for file in files:
        other = seen.setdefault(file.path.casefold(), file.path)
        if other != file.path:
            raise UploadCorrupt(f"{other} and {file.path} are one name on many file systems")


def _digest(path: Path, size: int) -> str:
    """The hash of a local file of exactly this size; empty where there is none."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return ""
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _write_private(directory: Path, name: str, data: bytes) -> None:
    _private_directory(directory)
    partial = directory / f".{name}.part"
    partial.touch(mode=0o600)
    partial.write_bytes(data)
    partial.replace(directory / name)


def _private_directory(directory: Path) -> None:
    """mkdir's own mode reaches only the last of several new directories."""
    for path in reversed((directory, *directory.parents)):
        path.mkdir(exist_ok=True, mode=0o700)
