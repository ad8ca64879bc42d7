"""Long measurements in parts, under one budget of time; every finding is on disk as soon as it is made.

A part gets the seconds that it should need, more where the budget has more, and whatever the parts before it saved; it
is skipped, with a note, where less is left than it needs at least. What it starts are processes of their own with a
limit each, so nothing that hangs can take the whole measurement with it. `results.json` and `table.txt` are written
after every check and number.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class OutOfTime(Exception):
    """The part's time is over; what it has found so far counts."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a measurement."""

    name: str
    nominal_s: float
    """What it should need; parts after it begin no later for its sake."""
    least_s: float
    """With less time than this it is not begun."""
    work: Callable[[Work], None]


@dataclass(slots=True)
class Found:
    """What a part has found."""

    name: str
    state: str = "running"
    """Then `ok`, `FAILED`, `cut short` or `skipped`."""
    seconds: float = 0.0
    checks: dict[str, bool] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Done:
    """A process that ended, or was ended."""

    code: int | None
    """None: it ran past its limit and was killed."""
    text: str
    """Its output, both streams."""
    seconds: float


class Work:
    """What a part works with: its time, its findings, its processes."""

    def __init__(self, found: Found, out: Path, deadline: float, save: Callable[[], None]) -> None:
        self.found, self.out, self._deadline, self._save = found, out, deadline, save
        self._calls = itertools.count(1)
        self._lock = threading.Lock()  # a part may have several processes going, each watched by a thread

    def left(self) -> float:
        """Seconds left to this part."""
        return self._deadline - time.monotonic()

    def require(self, seconds: float, what: str) -> None:
        """Raises OutOfTime where less is left."""
        if self.left() < seconds:
            raise OutOfTime(f"{what}: {self.left():.0f} s left, {seconds:.0f} s needed")

    def check(self, text: str, holds: bool) -> bool:
        """Something that must be true."""
        with self._lock:
            self.found.checks[text] = bool(holds)
            self._save()
        return holds

    def number(self, name: str, value: Any) -> None:
        """Something that was measured: JSON types."""
        with self._lock:
            self.found.numbers[name] = value
            self._save()

    def note(self, text: str) -> None:
        """Something that a reader must know."""
        with self._lock:
            self.found.notes.append(text)
            self._save()

    def call(
        self, argv: Sequence[str], *, limit_s: float | None = None, environment: Mapping[str, str] | None = None
    ) -> Done:
        """Run a program from the checkout's root; it and its children are killed at the limit or the part's end."""
        limit_s = max(1.0, min(self.left(), limit_s if limit_s is not None else self.left()))
        log = self.out / "logs" / f"{self.found.name}-{next(self._calls)}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with log.open("wb") as file:
            child = subprocess.Popen(
                argv,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code: int | None = None
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                kill_group(child)
        return Done(code, log.read_text(errors="replace"), time.monotonic() - began)


def kill_group(child: subprocess.Popen[Any]) -> None:
    """End a child that leads a session of its own, with all that stayed in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10.0)


def run_parts(parts: Sequence[Part], out: Path, budget_s: float, head: Mapping[str, Any]) -> int:
    """Run them in order; returns 0 unless something failed. TERM ends the measurement and its processes."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    stretch = max(1.0, budget_s / sum(part.nominal_s for part in parts))
    done: list[Found] = []
    planned = 0.0

    def save() -> None:
        write(out, head, done, time.monotonic() - began)

    for part in parts:
        planned = min(budget_s, planned + part.nominal_s * stretch)
        found = Found(part.name)
        done.append(found)
        start = time.monotonic()
        work = Work(found, out, began + planned, save)
        print(f"== {part.name}: up to {max(0.0, work.left()):.0f} s", flush=True)
        if work.left() < part.least_s:
            found.state = "skipped"
            work.note(f"skipped: {max(0.0, work.left()):.0f} s left, it needs {part.least_s:.0f} s at least")
        else:
            _run(part, work)
        found.seconds = round(time.monotonic() - start, 1)
        save()
        print("\n".join(lines_of(found)), flush=True)
    return int(any(found.state == "FAILED" for found in done))


def _run(part: Part, work: Work) -> None:
    found = work.found
    try:
        part.work(work)
    except OutOfTime as late:
        found.state = "cut short"
        found.notes.append(str(late))
    except Exception as error:  # noqa: BLE001  # the other parts must still run, and the reader must see this one
        found.checks[f"no error ({type(error).__name__}: {error})"] = False
        found.notes.append(traceback.format_exc())
    if not all(found.checks.values()):
        found.state = "FAILED"
    elif found.state == "running":
        found.state = "ok"


def write(out: Path, head: Mapping[str, Any], done: Sequence[Found], seconds: float) -> None:
    """Both files, each replaced in one step."""
    values = {"head": dict(head), "seconds": round(seconds, 1), "parts": [asdict(found) for found in done]}
    table = [f"{key}: {value}" for key, value in head.items()]
    for found in done:
        table += ["", *lines_of(found)]
    for name, text in (("results.json", json.dumps(values, indent=1)), ("table.txt", "\n".join(table))):
        fresh = out / f".{name}"
        fresh.write_text(text + "\n")
        fresh.replace(out / name)


def lines_of(found: Found) -> list[str]:
    """A part as lines of the table."""
    lines = [f"{found.name:<24}{found.state:<10}{found.seconds:>8.1f} s"]
    lines += [f"  {'holds ' if holds else 'BROKEN'}  {text}" for text, holds in found.checks.items()]
    for name, value in found.numbers.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"  {name}", *(f"    {row}" for row in rows_of(value))]
        else:
            lines.append(f"  {name:<56}  {plain(value)}")
    lines += [f"  note    {line}" for note in found.notes for line in note.rstrip().splitlines()]
    return lines


def rows_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of equal keys as aligned columns."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys, *([plain(row.get(key, "")) for key in keys] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def plain(value: Any) -> str:
    """A value for a reader."""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(plain(item) for item in value)
    return str(value)


def budget(text: str) -> float:
    """Seconds on the command line: some, and an end. What it raises argparse tells as a usage error."""
    value = float(text)
    if not 0 < value < math.inf:  # NaN is neither
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return value


def folder(text: str) -> Path:
    """A folder on the command line, made where there is none; refused where results could not be written."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}; choose a folder that can be written") from error
    return path.absolute()


def chosen(parts: Sequence[Part], names: str) -> list[Part]:
    """The parts of a comma-separated list, in their own order; empty: all. A wrong name ends the program."""
    if not names:
        return list(parts)
    wanted = [name.strip() for name in names.split(",")]
    known = [part.name for part in parts]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"unknown part {', '.join(unknown)}; the parts are {', '.join(known)}")
    return [part for part in parts if part.name in wanted]
