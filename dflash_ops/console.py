"""What the operator sees: lines, tables, JSON, errors. Remote text is made harmless before it reaches a terminal."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from dflash_ops.agent.runs import RunStatus
from dflash_ops.errors import OpsError, UsageError
from dflash_ops.tail import Cleaner


def say(text: str) -> None:
    """One line on standard output, at once."""
    print(harmless(text), flush=True)


def remark(text: str) -> None:
    """One line on standard error: about the work, not its result."""
    print(harmless(text), file=sys.stderr, flush=True)


def show_error(error: OpsError, target: str = "") -> None:
    for index, line in enumerate(error.lines()):
        remark(f"[{target}] {line}" if target and index == 0 else line)


def show_json(body: dict[str, Any]) -> None:
    """One object per line. What JSON cannot say (nan, inf) becomes null."""
    print(json.dumps(_finite(body), ensure_ascii=True), flush=True)


@contextlib.contextmanager
def upload(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar with the rate on a terminal, one line elsewhere."""
    if not sys.stderr.isatty():
        say(f"{title}, {total / 2**20:.1f} MiB")
        yield lambda _sent: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda sent: progress.update(bar, completed=sent)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be; nothing is cut, so that it can be copied and piped."""
    cleaned = [[harmless(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cleaned) for column in range(len(head))]
    for row in cleaned:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()


def harmless(text: str) -> str:
    """Text without control sequences, on one line."""
    cleaner = Cleaner()
    return " ".join((cleaner.feed(text.encode("utf-8", "replace")) + cleaner.end()).splitlines())


def moment(seconds: float | None) -> str:
    """A time as the operator's own clock shows it."""
    return "-" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    passed = max(0, int(time.time() - seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= size:
            return f"{passed // size} {unit} ago"
    return f"{passed} s ago"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}" if digits else f"{value:,.0f}"


def describe_run(status: RunStatus) -> list[str]:
    """One run in a few lines."""
    latest = status.latest
    lines = [f"run      {status.run_id}", f"state    {status.state}{f': {status.detail}' if status.detail else ''}"]
    if status.state == "failed" and status.latest.end and (said := status.latest.end.get("error")):
        lines.append(f"why      {said}")
    lines.append(f"started  {moment(status.created_at)} ({ago(status.created_at)})")
    if status.ended_at is not None:
        lines.append(f"ended    {moment(status.ended_at)} ({ago(status.ended_at)})")
    lines.append(f"release  {status.release}, variant {status.variant}, {status.launcher}, pid {status.pid or '-'}")
    if latest.step is not None:
        lines.append(
            f"step     {latest.step}, loss {number(latest.loss)}, acceptance length {number(latest.accept_len, 2)}, "
            f"{number(latest.context_tokens_per_s, 0)} tokens/s, last word {ago(latest.time)}"
        )
    if latest.checkpoint:
        lines.append(f"saved    {latest.checkpoint}")
    return [*lines, f"log      {status.log}"]


def confirm(question: str, word: str) -> None:
    """Let the operator type `word` before something is destroyed; UsageError where they do not, or cannot."""
    if not sys.stdin.isatty():
        raise UsageError(f"refusing to {question} unasked", hint="--yes does it without a question")
    print(f"{harmless(question)}? type {word!r} to go on: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip() != word:
        raise UsageError("nothing was changed", why="the answer was another one")


def end_quietly() -> None:
    """The reader of our output has gone (`| head`): nothing more can be said, and that is no error."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
