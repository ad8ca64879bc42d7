"""Small things that must be done right on a disk: whole writes, durable renames, locks, safe removal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from dflash_ops.errors import EnvironmentUnfit, OpsError

DISK_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""What a disk or its permissions can do to any verb; everything else that is an OSError is ours."""


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """The file holds all of `data` or what it held before, also after a power cut."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, body: dict[str, Any], mode: int = 0o600) -> None:
    write_whole(path, json.dumps(body, indent=2, sort_keys=True).encode() + b"\n", mode)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file; None where there is no file or no object in it."""
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flip_link(link: Path, destination: str) -> None:
    """Point `link` at `destination` in one step; a reader sees the old or the new, never neither."""
    partial = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    partial.symlink_to(destination)
    try:
        partial.replace(link)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(link.parent)


def try_lock(path: Path) -> int | None:
    """An open, exclusively locked descriptor, or None where somebody else holds the lock. Freed with its last copy."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_aside(path: Path) -> bool:
    """Rename away, then delete: nobody can walk into a half-deleted tree. False where there was nothing."""
    aside = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


def sweep_trash(directory: Path) -> None:
    """What an earlier `remove_aside` could not finish."""
    with contextlib.suppress(OSError):
        for path in directory.glob(".trash-*"):
            shutil.rmtree(path, ignore_errors=True)


def disk_error(error: OSError, doing: str) -> OpsError:
    """An OSError of the disk as an error with a next step."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentUnfit(
            f"the disk is full while {doing}", why=str(error), hint="free space on the target, then try again"
        )
    return EnvironmentUnfit(
        f"the disk refuses while {doing}", why=str(error), hint="check owner, permissions and mount of that path"
    )
