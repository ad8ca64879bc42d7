"""Which checkpoints may go, by a policy that never takes the last good one.

Kept in every run: the newest `keep`, the best by held-out acceptance, and the newest that is whole by size and hash.
A run that is going is not looked at. What was left half-written by a run that has ended goes too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.agent import files, process, runs
from dflash_ops.agent.layout import Layout
from dflash_ops.errors import UsageError

UNFINISHED = (".partial-", ".discard-", ".trash-")


@dataclass(frozen=True, slots=True)
class PruneRequest:
    """`remove` empty: only plan. Else exactly these paths, as an earlier plan named them."""

    who: str
    keep: int = 2
    remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A directory that may go. `path` is relative to the runs directory."""

    path: str
    size: int
    why: str


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """`removed` is empty for a plan; `kept` counts the checkpoints that stay."""

    candidates: tuple[Candidate, ...]
    kept: int
    removed: tuple[str, ...] = ()
    freed: int = 0


def prune(layout: Layout, request: PruneRequest, say: Callable[[str], None]) -> PrunePlan:
    """Plan, or remove what was planned; a path that is no candidate any more stays and is named."""
    if request.keep < 1:
        raise UsageError("--keep must be at least 1", hint="the newest checkpoint of a run always stays")
    plan = _plan(layout, request.keep, say)
    removed, freed = [], 0
    allowed = {candidate.path: candidate for candidate in plan.candidates}
    for name in request.remove:
        candidate = allowed.get(name)
        if candidate is None:
            say(f"kept {name}: it is no candidate any more")
        elif files.remove_aside(layout.runs / name):
            removed.append(name)
            freed += candidate.size
    return PrunePlan(plan.candidates, plan.kept, tuple(removed), freed)


def _plan(layout: Layout, keep: int, say: Callable[[str], None]) -> PrunePlan:
    found: list[Candidate] = []
    kept = 0
    for directory in runs.directories(layout):
        record = runs.read_run(directory)
        names = runs.checkpoint_names(directory)
        if record is None or runs.derive(record, directory).live or process.alive(record.trainer):
            kept += len(names)
            continue
        stay = _protected(directory, names, keep, say)
        kept += len(stay)
        base = directory / "checkpoints"
        for name in names:
            if name not in stay:
                found.append(Candidate(f"{directory.name}/checkpoints/{name}", _size(base / name), f"not among {keep}"))
        if base.is_dir():
            for path in sorted(base.iterdir()):
                if path.name.startswith(UNFINISHED) and path.is_dir() and not path.is_symlink():
                    found.append(Candidate(f"{directory.name}/checkpoints/{path.name}", _size(path), "half-written"))
    return PrunePlan(tuple(found), kept)


def _protected(directory: Path, names: list[str], keep: int, say: Callable[[str], None]) -> set[str]:
    """The names that stay. Hashing stops at the newest whole checkpoint, so usually one is read."""
    if len(names) <= keep:
        return set(names)
    stay = set(names[-keep:])
    best = directory / "checkpoints" / "best"
    if best.is_symlink() and best.resolve().name in names:
        stay.add(best.resolve().name)
    for name in reversed(names):
        fault = damage(directory / "checkpoints" / name)
        if fault is None:
            stay.add(name)
            return stay
        say(f"{directory.name}/checkpoints/{name} is damaged: {fault}")
    return set(names)  # none is whole: a person has to look before anything goes


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by the sizes and hashes that its own state.json gives; None: it is whole."""
    try:
        state = json.loads((checkpoint / "state.json").read_bytes())
        entries = state["files"]
        for name, entry in entries.items():
            path = checkpoint / Path(name).name
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    return f"{name} does not match its hash"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"state.json or a file cannot be read ({error})"
    return None


def _size(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            if not path.is_symlink():
                total += path.stat().st_size
    return total
