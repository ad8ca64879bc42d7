"""metrics.jsonl, read back: one Event a line, broken lines skipped.

The file is read while it is written and after crashes, so a cut last line, NUL padding or a line that is no object
is normal; what can be read is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One line of metrics.jsonl. `time` is in Unix seconds by the target's clock."""

    kind: str
    time: float
    values: Mapping[str, Any]

    @property
    def step(self) -> int | None:
        """The optimizer step that the event belongs to."""
        step = self.values.get("step")
        return step if isinstance(step, int) and not isinstance(step, bool) else None

    def number(self, key: str) -> float | None:
        """A value as a float; None where it is absent or no number. NaN and infinity pass."""
        return _number(self.values.get(key))

    def numbers(self, key: str) -> dict[str, float]:
        """A value that holds several numbers (queues, utilization, one per GPU), by name or index."""
        value = self.values.get(key)
        items: Iterator[tuple[object, object]]
        if isinstance(value, Mapping):
            items = iter(value.items())
        elif isinstance(value, list):
            items = iter(enumerate(value))
        else:
            return {}
        return {str(name): number for name, raw in items if (number := _number(raw)) is not None}


def parse_events(text: str) -> tuple[Event, ...]:
    """Every readable event, in file order.

    >>> [event.step for event in parse_events('{"event":"step","time":1.0,"step":7}\\n{"event":"st')]
    [7]
    """
    return tuple(event for line in text.splitlines() if (event := _parse(line)) is not None)


def _parse(line: str) -> Event | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    kind, time = record.get("event"), _number(record.get("time"))
    if not isinstance(kind, str) or time is None or not math.isfinite(time):
        return None
    return Event(kind, time, record)


def _number(value: object) -> float | None:
    if isinstance(value, str):
        # JSON has no word for them; the trainer writes them as text.
        return float(value) if value in ("nan", "inf", "-inf") else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
