"""Handing a run's files out: a listing with hashes, then any stretch of any listed file."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dflash_ops.agent import runs
from dflash_ops.agent.layout import Layout
from dflash_ops.agent.runs import RunStatus
from dflash_ops.agent.wire import Data, Event
from dflash_ops.errors import UsageError

PIECE = 1 << 18
HASH_PIECE = 1 << 22
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,200}\Z")
"""A name that is safe on every file system; hidden and half-written files are left out by it."""
UNFINISHED = re.compile(r"\.(?:partial|tmp)\Z")


@dataclass(frozen=True, slots=True)
class ListRequest:
    """`checkpoints`: all, newest or none."""

    run_id: str = ""
    checkpoints: str = "all"


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file below the run's directory. Of a file that still grows, the first `size` bytes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Listing:
    run: RunStatus
    files: tuple[ListedFile, ...]


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Bytes `offset` to `size` of one file."""

    run_id: str
    path: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class FetchEnd:
    """All was sent; `size` is where it ended, less than asked for where the file is shorter now."""

    size: int


def listing(layout: Layout, request: ListRequest, say: Callable[[str], None]) -> Listing:
    """Every plain file of a run, sorted by path; links and special files are left out and named."""
    status = _find(layout, request.run_id)
    directory = Path(status.directory)
    kept = []
    for path in _walk(directory, Path(), say):
        if path.parts[0] != "checkpoints" or _wanted(directory, path, request.checkpoints):
            kept.append(path)
    return Listing(status, tuple(_listed(directory, path) for path in sorted(kept)))


def fetch(layout: Layout, request: FetchRequest, emit: Callable[[Event], bool]) -> FetchEnd:
    """Send a stretch of one file as data frames."""
    status = _find(layout, request.run_id)
    parts = request.path.split("/")
    if not parts or not all(PART.match(part) for part in parts):
        raise UsageError(f"{request.path!r} is no path inside a run")
    with _open(Path(status.directory), parts) as file:
        info = os.fstat(file.fileno())
        position = min(max(request.offset, 0), info.st_size)
        file.seek(position)
        while position < request.size and (piece := file.read(min(PIECE, request.size - position))):
            if not emit(Data(position, info.st_ino, piece)):
                break
            position += len(piece)
    return FetchEnd(position)


def _find(layout: Layout, run_id: str) -> RunStatus:
    status = runs.find(layout, run_id)
    if status is None:
        raise UsageError("there is no run on this target yet", hint="`fab deploy launch`")
    return status


def _walk(directory: Path, below: Path, say: Callable[[str], None]) -> Iterator[Path]:
    for entry in sorted(os.scandir(directory / below), key=lambda entry: entry.name):
        path = below / entry.name
        if not PART.match(entry.name) or UNFINISHED.search(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(directory, path, say)
        elif entry.is_file(follow_symlinks=False):
            yield path
        else:
            say(f"left out: {path} is no plain file")


def _wanted(directory: Path, path: Path, checkpoints: str) -> bool:
    if checkpoints == "all" or len(path.parts) < 2:
        return checkpoints != "none"
    if checkpoints == "none":
        return False
    return path.parts[1] == runs.newest_checkpoint_name(directory)


def _listed(directory: Path, path: Path) -> ListedFile:
    digest = hashlib.sha256()
    with _open(directory, list(path.parts)) as file:
        size = left = os.fstat(file.fileno()).st_size
        while left > 0 and (piece := file.read(min(HASH_PIECE, left))):
            digest.update(piece)
            left -= len(piece)
    return ListedFile(path.as_posix(), size - left, digest.hexdigest())


def _open(directory: Path, parts: list[str]) -> BinaryIO:
    """Open a file below `directory`, walking without following any link."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(part, flags, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        opened = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=descriptor)
    except OSError as error:
        raise UsageError(f"{'/'.join(parts)} is no plain file of this run", why=error.strerror or "") from None
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise UsageError(f"{'/'.join(parts)} is no plain file of this run")
    return os.fdopen(opened, "rb")
