"""One self-contained HTML page about a run: its facts, and plots that can be read, zoomed and shared.

Nothing is loaded from anywhere: the page's content policy forbids it. All text reaches the page as JSON and is
written with textContent, so a hostile log line stays text.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_ops.events import Event
from dflash_ops.scrub import scrub, scrub_record

TEMPLATE = Path(__file__).with_name("report_page.html")
PLACEHOLDER = '"@@RUN@@"'
MAX_POINTS = 3000
"""Points of one line at most; more are thinned so that every peak stays."""


@dataclass(frozen=True, slots=True)
class RunPage:
    """What the page is about. `facts` are (name, value) rows; `proof` is a diagnosis with its lines, if any."""

    run_id: str
    state: str
    evidence: str
    facts: tuple[tuple[str, str], ...]
    events: tuple[Event, ...]
    proof: tuple[str, ...] = ()
    log_tail: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot: steps, Unix times, values of equal length. A missing value is None."""

    name: str
    steps: tuple[int | None, ...]
    times: tuple[float, ...]
    values: tuple[float | None, ...]
    marks: bool = False
    """Draw the points themselves: rare events such as evaluations."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot. `log_scale` offers a logarithmic axis; `floor` pins the lower end."""

    id: str
    title: str
    unit: str
    series: tuple[Series, ...]
    log_scale: bool = False
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class _Plot:
    id: str
    title: str
    unit: str
    keys: tuple[str, ...]
    log_scale: bool = False
    floor: float | None = None
    names: dict[str, str] = field(default_factory=dict)


_PLOTS = (
    _Plot("loss", "Loss", "", ("loss",), log_scale=True),
    _Plot("acceptance", "Acceptance length", "tokens", ("accept_len",), names={"accept_len": "training"}),
    _Plot(
        "throughput",
        "Throughput",
        "tokens/s",
        (
            "context_tokens_per_s",
            "block_tokens_per_s",
            "reused_context_tokens_per_s",
            "reused_block_tokens_per_s",
        ),
        floor=0,
        names={
            "context_tokens_per_s": "context",
            "block_tokens_per_s": "blocks",
            "reused_context_tokens_per_s": "context, reused",
            "reused_block_tokens_per_s": "blocks, reused",
        },
    ),
    _Plot("queues", "Queues", "batches waiting", ("queues",), floor=0),
    _Plot("utilization", "Stage utilization", "share of time", ("utilization",), floor=0),
    _Plot("memory", "Peak memory", "GB", ("memory_gb",), floor=0, names={"memory_gb": "fullest device"}),
    _Plot("gradient", "Gradient norm", "", ("grad_norm",), log_scale=True, floor=0),
    _Plot("rate", "Learning rate", "", ("lr",), floor=0),
)


_CARD_PLOTS = {
    "utilization": ("GPU utilization", "%"),
    "memory_mib": ("GPU memory", "MiB"),
    "power_w": ("GPU power", "W"),
    "temperature_c": ("GPU temperature", "°C"),
}


def render(page: RunPage) -> str:
    """The page as text."""
    text = json.dumps(_payload(page), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    # Inside a script element only "<" could end it; as an escape it cannot.
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACEHOLDER, text.replace("<", "\\u003c"), 1)


def charts(events: Sequence[Event]) -> tuple[Chart, ...]:
    """Every plot that the events have numbers for."""
    steps = [event for event in events if event.kind == "step"]
    found = []
    for plot in _PLOTS:
        series = [line for key in plot.keys for line in _series(steps, key, plot.names.get(key, key))]
        if plot.id == "acceptance":
            evals = [event for event in events if event.kind == "eval"]
            series += _series(evals, "accept_len", "held-out", marks=True)
        if series:
            found.append(Chart(plot.id, plot.title, plot.unit, tuple(series), plot.log_scale, plot.floor))
    return (*found, *_card_charts(events, steps))


def _card_charts(events: Sequence[Event], steps: Sequence[Event]) -> list[Chart]:
    """One plot for each reading, one line for each card. A reading belongs to the step before it."""
    step_times = [event.time for event in steps]
    lines: dict[tuple[str, str], list[tuple[int | None, float, float]]] = {}
    for event in events:
        cards = event.values.get("cards") if event.kind == "gpu" else None
        at = bisect.bisect_right(step_times, event.time)
        step = steps[at - 1].step if at else 0
        for card in cards if isinstance(cards, list) else ():
            if not isinstance(card, dict):
                continue
            for key in _CARD_PLOTS:
                value = card.get(key)
                if isinstance(value, int | float) and _finite(value):
                    lines.setdefault((key, f"GPU {card.get('index')}"), []).append((step, event.time, float(value)))
    found = []
    for key, (title, unit) in _CARD_PLOTS.items():
        series = []
        for (of, name), points in lines.items():
            if of == key:
                kept = [points[index] for index, _ in thin([(n, p[2]) for n, p in enumerate(points)], MAX_POINTS)]
                stepped, times, values = zip(*kept, strict=True)
                series.append(Series(name, stepped, times, values))
        if series:
            found.append(Chart(f"gpu-{key}", title, unit, tuple(series), floor=0))
    return found


def _series(events: Sequence[Event], key: str, name: str, *, marks: bool = False) -> list[Series]:
    parts: dict[str, dict[int, float]] = {}
    for index, event in enumerate(events):
        number = event.number(key)
        values = {name: number} if number is not None else event.numbers(key)
        for part, value in values.items():
            parts.setdefault(part, {})[index] = value
    return [_line(events, part, points, marks=marks) for part, points in parts.items()]


def _line(events: Sequence[Event], name: str, points: dict[int, float], *, marks: bool) -> Series:
    kept = thin(list(points.items()), MAX_POINTS)
    return Series(
        name,
        tuple(events[index].step for index, _ in kept),
        tuple(events[index].time for index, _ in kept),
        tuple(value if math.isfinite(value) else None for _, value in kept),
        marks,
    )


def thin(points: list[tuple[int, float]], limit: int) -> list[tuple[int, float]]:
    """At most `limit` points: of each stretch its lowest, its highest and one that is not finite, in order."""
    if len(points) <= limit:
        return points
    buckets = max(limit // 3, 1)
    kept: list[tuple[int, float]] = []
    for bucket in range(buckets):
        stretch = points[bucket * len(points) // buckets : (bucket + 1) * len(points) // buckets]
        finite = [point for point in stretch if math.isfinite(point[1])]
        chosen = {point[0]: point for point in stretch if not math.isfinite(point[1])}
        chosen = dict(list(chosen.items())[:1])
        for pick in (min, max):
            if finite:
                point = pick(finite, key=lambda item: item[1])
                chosen[point[0]] = point
        kept.extend(sorted(chosen.values()))
    return kept


def _payload(page: RunPage) -> dict[str, Any]:
    events = page.events
    evals = [event for event in events if event.kind == "eval" and isinstance(event.values.get("by_position"), list)]
    return {
        "run": scrub(page.run_id),
        "state": page.state,
        "evidence": scrub(page.evidence),
        "facts": [[name, scrub(value)] for name, value in page.facts],
        "tiles": _tiles(events),
        "charts": [
            {
                "id": chart.id,
                "title": chart.title,
                "unit": chart.unit,
                "log": chart.log_scale,
                "floor": chart.floor,
                "series": [
                    {"name": s.name, "steps": s.steps, "times": s.times, "values": s.values, "marks": s.marks}
                    for s in chart.series
                ],
            }
            for chart in charts(events)
        ],
        "marks": list(_marks(events)),
        "positions": [
            {"step": event.step, "values": [v if _finite(v) else None for v in event.values["by_position"]]}
            for event in ([evals[0], evals[-1]] if len(evals) > 1 else evals)
        ],
        "config": _config(events),
        "proof": [scrub(line) for line in page.proof],
        "log": scrub(page.log_tail),
    }


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _marks(events: Iterable[Event]) -> Iterable[dict[str, Any]]:
    step = 0
    for event in events:
        step = event.step if event.step is not None else step
        if event.kind in ("start", "gate_open", "checkpoint", "end"):
            yield {"kind": event.kind, "step": step, "time": event.time}


def _tiles(events: Sequence[Event]) -> list[list[str]]:
    steps = [event for event in events if event.kind == "step"]
    evals = [event for event in events if event.kind == "eval"]
    saves = [event for event in events if event.kind == "checkpoint"]
    tiles: list[list[str]] = []

    def add(name: str, event: Event | None, key: str, form: Callable[[float], str]) -> None:
        number = event.number(key) if event is not None else None
        if number is not None:
            tiles.append([name, form(number)])

    last = steps[-1] if steps else None
    if last is not None and last.step is not None:
        total = last.number("max_steps")
        tiles.append(["step", f"{last.step:,}" + (f" of {total:,.0f}" if total else "")])
    add("loss", last, "loss", lambda value: f"{value:.3f}")
    add("acceptance, training", last, "accept_len", lambda value: f"{value:.2f}")
    add("acceptance, held-out", evals[-1] if evals else None, "accept_len", lambda value: f"{value:.2f}")
    rates = sorted(rate for event in steps if (rate := event.number("context_tokens_per_s")) is not None)
    if rates:
        tiles.append(["context tokens/s, median", f"{rates[len(rates) // 2]:,.0f}"])
    add("context tokens", last, "tokens", lambda value: f"{value:,.0f}")
    if saves:
        tiles.append(["last checkpoint", f"step {saves[-1].step}"])
    return tiles


def _config(events: Sequence[Event]) -> dict[str, Any]:
    start = next((event for event in reversed(events) if event.kind == "start"), None)
    config = scrub_record(start.values.get("config")) if start is not None else None
    return config if isinstance(config, dict) else {}
