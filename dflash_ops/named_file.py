"""Files that the operator names. Only regular ones are opened: a FIFO, or some devices, can be waited on for ever."""

from __future__ import annotations

import stat
from pathlib import Path

from dflash_ops.errors import UsageError

KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def require_regular(path: Path, error: type[UsageError] = UsageError) -> Path:
    """The path; `error` where something else than a regular file lies there. One that is missing is the opener's."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return path
    if not stat.S_ISREG(mode):
        raise error(
            f"{path}: is {KINDS.get(stat.S_IFMT(mode), 'no plain file')}, not a file",
            why="only regular files are opened: another kind can be waited on for ever",
            hint="name a regular file; what a command prints goes into one first",
        )
    return path
