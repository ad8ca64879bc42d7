"""The picture that `fab watch` draws: 80 columns by 24 lines hold all of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.text import Text

from dflash_ops.agent.gpu_log import Reading
from dflash_ops.agent.snapshot import Numbers, Snapshot
from dflash_ops.console import harmless
from dflash_ops.watch import UNREACHABLE, View

WIDTH = 80
CARDS = 9
BARS = "▁▂▃▄▅▆▇█"
GOOD = frozenset({"starting", "warming", "training", "finishing", "finished"})


@dataclass
class History:
    """The last minutes of one run, for the small curves."""

    run_id: str = ""
    step: int | None = None
    loss: deque[float] = field(default_factory=lambda: deque(maxlen=24))
    rate: deque[float] = field(default_factory=lambda: deque(maxlen=24))

    def add(self, view: View) -> None:
        """Take the view's numbers, once for each step; start anew with a new run."""
        if view.run_id != self.run_id:
            self.run_id, self.step = view.run_id, None
            self.loss.clear()
            self.rate.clear()
        numbers = view.snapshot.numbers if view.snapshot else Numbers()
        if numbers.step is None or numbers.step == self.step:
            return
        self.step = numbers.step
        for kept, value in ((self.loss, numbers.loss), (self.rate, numbers.context_tokens_per_s)):
            if value is not None and value - value == 0:
                kept.append(value)


def draw(view: View, history: History, *, width: int = WIDTH) -> Text:
    """The whole picture."""
    style = "bold red" if view.state not in GOOD else "bold green"
    style = "bold yellow" if view.state in ("stalled", UNREACHABLE) else style
    head = Text(f"{view.target}  {view.run_id or '-'}", style="bold")
    state = f"{view.state}"
    gap = max(2, width - head.cell_len - len(state))
    head.append(" " * gap + state, style=style)
    lines = [head, Text(harmless(view.detail), style="dim")]
    if view.error is not None:
        lines.append(Text(f"no connection for {span(view.lost_for_s)}; the numbers below are the last ones", "yellow"))
    if view.snapshot is not None:
        lines += [Text(text) for text in _numbers(view.snapshot, history, width)]
        lines += [Text(text) for text in _cards(view.snapshot.gpus, width)]
    lines.append(Text("Ctrl-C ends watching; the run goes on", style="dim"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def one_line(view: View) -> str:
    """The same where there is no terminal: one line for each change."""
    numbers = view.snapshot.numbers if view.snapshot else Numbers()
    step = f" step {numbers.step}" if numbers.step is not None else ""
    return f"{view.target} {view.run_id or '-'} {view.state}{step}: {view.detail}"


def _numbers(shot: Snapshot, history: History, width: int) -> Iterable[str]:
    numbers = shot.numbers
    if not numbers.gate_open:
        warmed = ", ".join(numbers.warmed) or "none yet"
        yield f"gate     closed; warmed up: {warmed}"
    yield _progress(numbers, width)
    yield f"loss     {_value(numbers.loss, 4):>9}  {spark(history.loss):<24}  gradient {_value(numbers.grad_norm, 2)}"
    heldout = _value(numbers.heldout_accept_len, 2)
    yield f"accepted {_value(numbers.accept_len, 2):>9}  held-out {heldout}"
    share = ""
    if numbers.context_tokens_per_s is not None and numbers.usual_tokens_per_s:
        share = f"{numbers.context_tokens_per_s / numbers.usual_tokens_per_s:.0%} of its median"
    yield f"tokens/s {_value(numbers.context_tokens_per_s, 0):>9}  {spark(history.rate):<24}  {share}"
    yield "waiting  " + (_pairs((name, f"{value:.0f}") for name, value in numbers.queues.items()) or "-")
    yield from _wrapped("busy     ", [f"{name} {value:.0%}" for name, value in numbers.utilization.items()], width)
    if numbers.balance is not None:
        yield harmless(f"balance  {numbers.balance}")
    saved = "no checkpoint yet"
    if numbers.checkpoint_time is not None:
        saved = f"step {numbers.checkpoint_step}, {span(shot.time - numbers.checkpoint_time)} ago"
    yield f"saved    {saved}"
    yield "machine  " + _machine(shot)


def _progress(numbers: Numbers, width: int) -> str:
    if numbers.step is None:
        return "step             -"
    text = f"step     {numbers.step:>9,}"
    if numbers.max_steps:
        done = min(numbers.step / numbers.max_steps, 1.0)
        filled = round(done * 24)
        text += f"  {'█' * filled}{'░' * (24 - filled)}  {done:.0%} of {numbers.max_steps:,}"
    return text[:width]


def _machine(shot: Snapshot) -> str:
    parts = []
    if shot.disk_free_bytes is not None:
        parts.append(f"disk {shot.disk_free_bytes / 2**30:,.0f} GiB free")
    if shot.memory_used is not None:
        limit = f" of {shot.memory_limit / 2**30:,.0f}" if shot.memory_limit else ""
        parts.append(f"memory {shot.memory_used / 2**30:,.0f}{limit} GiB")
    last = shot.numbers.last_event
    if last is not None:
        parts.append(f"last word {span(shot.time - last)} ago")
    return ", ".join(parts)


def _cards(cards: tuple[Reading, ...], width: int) -> Iterable[str]:
    if not cards:
        return
    yield "GPU    busy     memory                         power   temperature"
    for card in cards[:CARDS]:
        total = card.memory_total_mib
        share = card.memory_mib / total if card.memory_mib is not None and total else None
        bar = f"{'█' * round(share * 10):░<10}" if share is not None else " " * 10
        memory = (
            f"{_value(card.memory_mib and card.memory_mib / 1024, 1):>6} of {_value(total and total / 1024, 0)} GiB"
        )
        index = "?" if card.index is None else str(card.index)
        yield (
            f"{index:>3}  {_value(card.utilization, 0):>4} %  {bar} {memory:<17} "
            f"{_value(card.power_w, 0):>5} W  {_value(card.temperature_c, 0):>6} °C"
        )[:width]
    if len(cards) > CARDS:
        yield f"     and {len(cards) - CARDS} more"


def _wrapped(head: str, words: list[str], width: int, most: int = 2) -> Iterable[str]:
    """Words over at most `most` lines; what does not fit is counted."""
    line, lines = head, 0
    for index, word in enumerate(words or ["-"]):
        if len(line) + len(word) > width - (8 if lines == most - 1 else 0) and line.strip() != head.strip():
            if lines == most - 1:
                yield f"{line}+{len(words) - index}"
                return
            yield line.rstrip()
            line, lines = " " * len(head), lines + 1
        line += word + "  "
    yield line.rstrip()


def _pairs(items: Iterable[tuple[str, str]]) -> str:
    return "  ".join(f"{name} {value}" for name, value in items)


def spark(values: Iterable[float]) -> str:
    """A curve in one line of text.

    >>> spark([1, 2, 3])
    '▁▅█'
    """
    points = list(values)
    if len(points) < 2:
        return ""
    low, high = min(points), max(points)
    return "".join(BARS[round((value - low) / (high - low or 1) * (len(BARS) - 1))] for value in points)


def span(seconds: float) -> str:
    """A length of time in at most six characters.

    >>> [span(s) for s in (3, 90, 4000, 200000)]
    ['3 s', '90 s', '67 min', '56 h']
    """
    seconds = max(seconds, 0.0)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _value(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
