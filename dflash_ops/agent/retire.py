"""Releases and agents that nobody will ask for again are removed: releases at the end of a deploy, agents at the end of
any call, since they are also shipped to a target's host, where nothing is deployed.

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
    """Remove old agents, each with its compiled twin, from the directory of the running one. Returns their hashes."""
    found: dict[str, list[Path]] = {}
    for path in directory.iterdir():
        found.setdefault(_hash(path), []).append(path)
    if len(found) <= KEPT + 1:  # nearly always: nothing to look for
        return []
    # By hash, not by path: an argv may begin with ~/, and may name the shipped archive or the twin.
    words = " ".join(word for line in process.command_lines().values() for word in line)
    free = {name for name in found if name not in words} - {_hash(running)}
    gone = []
    for path in _old(max(found[name], key=_date) for name in free):
        for one in found[_hash(path)]:
            with contextlib.suppress(OSError):
                one.unlink()
        gone.append(_hash(path))
    return gone


def _date(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _hash(agent: Path) -> str:
    """What names an agent: the first part of its file's name, of its twin's, and of what a cut upload left."""
    return agent.name.lstrip(".").partition(".")[0]


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
