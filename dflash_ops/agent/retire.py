"""Releases and agents that nobody will ask for again: removed at the end of a deploy, so that a target does not fill.

What stays: the current and the previous release, the release of every run that is alive, every one that was in use
within the last hour (a launch may have read `current` just before a deploy moved it), and the newest five of the rest.
Agents likewise: the one that is running, those of living supervisors, the newest five of the rest.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from dflash_ops.agent import files, process, runs
from dflash_ops.agent.layout import RELEASE_ID, Layout, linked_release

KEPT = 5
IN_USE_S = 3600.0


def releases(layout: Layout) -> list[str]:
    """Remove old releases with their caches; the caller holds the deploy lock. Returns their ids."""
    needed = {linked_release(layout.current), linked_release(layout.previous), *_of_living_runs(layout)}
    found = [path for path in layout.releases.iterdir() if RELEASE_ID.match(path.name)]
    gone = []
    for path in _old(path for path in found if path.name not in needed):
        if files.remove_aside(path):
            for left in (layout.cache / path.name, layout.pycache / path.name):
                files.remove_aside(left)
            gone.append(path.name)
    return gone


def agents(directory: Path, running: Path) -> list[str]:
    """Remove old agents from the directory that holds the one that is running. Returns their names."""
    words = {word for line in process.command_lines().values() for word in line}
    found = [path for path in directory.glob("*.pyz") if path != running and str(path) not in words]
    gone = []
    for path in _old(found):
        with contextlib.suppress(OSError):
            path.unlink()
            gone.append(path.name)
    return gone


def used(path: Path) -> None:
    """Note that a release is in use from now on."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _old(paths: Iterable[Path]) -> list[Path]:
    """All but the newest few and those that were in use just now, by the time of last use."""
    dated = []
    for path in paths:
        with contextlib.suppress(OSError):
            dated.append((path.stat().st_mtime, path))
    dated.sort(reverse=True)
    before = time.time() - IN_USE_S
    return [path for date, path in dated[KEPT:] if date < before]


def _of_living_runs(layout: Layout) -> set[str]:
    found = set()
    for directory in runs.directories(layout):
        record = runs.read_run(directory)
        if record is not None and (process.alive(record.supervisor) or process.alive(record.trainer)):
            found.add(record.release)
        elif record is not None and record.supervisor is None and process.alive(record.launched_by):
            found.add(record.release)  # its launch is handing over
    return found
