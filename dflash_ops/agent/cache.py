"""Compile caches: one per release under the target's root, cleared only under the launch lock."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from dflash_ops.agent import files, process
from dflash_ops.agent.layout import RELEASE_ID, Layout

LEGACY = re.compile(r"/tmp/torchinductor_[A-Za-z0-9_.-]+\Z")


def environment(layout: Layout, release_id: str) -> dict[str, str]:
    """Where the compilers of this release keep their work."""
    base = layout.cache / release_id
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(base / "inductor"),
        "TRITON_CACHE_DIR": str(base / "triton"),
        "PYTHONPYCACHEPREFIX": str(layout.pycache / release_id),
    }


def clear(layout: Layout, release_ids: list[str], legacy: tuple[str, ...]) -> list[str]:
    """Clear these releases' caches and these paths outside the root; returns what was done, for people.

    The caller holds the launch lock. A path outside the root must be on the allow-list, be this user's own
    directory and be open in no process.
    """
    done = []
    files.sweep_trash(layout.cache)
    for release_id in release_ids:
        if RELEASE_ID.match(release_id) and files.remove_aside(layout.cache / release_id):
            done.append(f"cleared {layout.cache / release_id}")
    for text in legacy:
        path = Path(text)
        refusal = _refusal(path)
        if refusal:
            done.append(f"kept {path}: {refusal}")
        elif files.remove_aside(path):
            done.append(f"cleared {path}")
    return done


def _refusal(path: Path) -> str:
    """Why this path must stay; empty where it may go."""
    if not LEGACY.match(str(path)):
        return "not on the allow-list"
    try:
        info = path.lstat()
    except OSError:
        return ""
    if not stat.S_ISDIR(info.st_mode):
        return "not a directory"
    if info.st_uid != os.getuid():
        return "belongs to another user"
    holder = _holder(path)
    return f"open in process {holder}" if holder else ""


def _holder(path: Path) -> int | None:
    """A process with something under this path open or mapped, as far as this user may look."""
    prefix = f"{path}/"
    for pid in process.command_lines():
        base = Path("/proc") / str(pid)
        try:
            if any(_link(entry).startswith(prefix) for entry in (base / "fd").iterdir()):
                return pid
            if prefix in (base / "maps").read_text(errors="replace"):
                return pid
        except OSError:
            continue
    return None


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
