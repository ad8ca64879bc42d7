"""Which stage holds the run up, and which split of its GPUs would hold it up least.

Both follow from where each stage's time went (`StageTimes`). In a pipeline of bounded channels the slowest stage hardly
waits and every other one waits for it, in front or behind (the utilization law of queues), so the bottleneck is the
stage that was held up least. Among drafters it is the one that waited least for the others in the gradient exchange: it
came last, and its own time says why. What every drafter waits in one exchange, the last one included, is the exchange
itself.

A split of G GPUs into T targets and D drafters passes min(T / t, D / d) batches a second, where t and d are the seconds
that one GPU of each kind spends on a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.config import TopologyConfig
from trainer.events import Balance
from trainer.stages.clock import StageTimes

MIN_STEPS = 20
MIN_BATCHES = 10
"""Of every target and drafter; with less nothing is said."""
SETTLE_STEPS = 5
"""First steps of a run that are not looked at: channels fill, kernels choose their tiles."""
EVERY_LOGS = 10
"""Logged steps from one report to the next."""
VERIFIER_SHARE = 0.1
"""A verifier that works more than this on a bottleneck's device is named."""
EXCHANGE_SHARE = 0.25
"""The exchange is the bottleneck where it takes more than this of the drafters' time."""
WORTH_SAYING = 1.05
"""A split that gains less is not advised."""

Role = Literal["data", "target", "drafter", "verifier"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the pipeline and its device."""

    name: str
    role: Role
    device: str


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs for targets and for drafters, and how much faster that passes batches than the present split."""

    targets: int
    drafters: int
    gain: float


def stages_of(topology: TopologyConfig) -> tuple[Stage, ...]:
    """The stages by the names that the pipeline gives them."""
    return (
        Stage("prefetcher", "data", "cpu"),
        *(Stage(f"target{t}", "target", device) for t, device in enumerate(topology.target)),
        *(Stage(f"drafter{d}", "drafter", device) for d, device in enumerate(topology.drafter)),
        *(Stage(f"verifier{v}", "verifier", device) for v, device in enumerate(topology.evaluating)),
    )


def best_split(target_s: float, drafter_s: float, targets: int, drafters: int) -> Split:
    """The T + D = targets + drafters, both at least 1, with the highest min(T / target_s, D / drafter_s).

    Seconds are those of one GPU for one batch. Where several are equal, the one nearest to the present split.
    """

    def rate(count: int) -> float:
        return min(count / target_s, (total - count) / drafter_s)

    total = targets + drafters
    best = max(range(1, total), key=lambda count: (rate(count), -abs(count - targets), -count))
    return Split(best, total - best, rate(best) / rate(targets))


class BalanceWatch:
    """Adds up the stages' times and says, once there is enough to say it, how they stand."""

    def __init__(self, stages: tuple[Stage, ...], *, log_every: int, reuse: int = 1) -> None:
        """`reuse`: how many batches drafters train on for each one that the target computes."""
        self._stages = stages
        self._every = max(MIN_STEPS, EVERY_LOGS * log_every)
        self._reuse = reuse
        self._left = SETTLE_STEPS
        self._reported = False
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._times = {stage.name: StageTimes() for stage in self._stages}

    def add(self, steps: int, times: Mapping[str, StageTimes]) -> None:
        """What `steps` further steps took."""
        if self._left > 0:
            self._left -= steps
            return
        self._steps += steps
        for name, seconds in times.items():
            self._times[name] += seconds

    def due(self, step: int, *, last: bool = False) -> Balance | None:
        """The report, if it is time for one: once there is enough to go by, then at intervals, and at the end."""
        enough = self._steps >= MIN_STEPS and all(
            self._times[stage.name].batches >= MIN_BATCHES
            for stage in self._stages
            if stage.role in ("target", "drafter")
        )
        if not enough or (self._reported and not last and self._steps < self._every):
            return None
        found = judge(self._stages, self._times, step=step, steps=self._steps, reuse=self._reuse)
        self._reported = True
        self._clear()
        return found


def judge(
    stages: tuple[Stage, ...], times: Mapping[str, StageTimes], *, step: int, steps: int, reuse: int = 1
) -> Balance:
    """Name the bottleneck of one window and the best split. Every target and drafter has done a batch in it."""
    of: dict[Role, list[Stage]] = {"data": [], "target": [], "drafter": [], "verifier": []}
    for stage in stages:
        of[stage.role].append(stage)
    exchange_s = _exchange_itself([times[stage.name] for stage in of["drafter"]])
    last = min((times[stage.name] for stage in of["drafter"]), key=lambda t: t.share(t.exchange))
    held = {
        "data": max(_occupied(times[stage.name]) for stage in of["data"]),
        "target": max(_occupied(times[stage.name]) for stage in of["target"]),
        "drafter": last.share(last.occupied + exchange_s),
    }
    slowest: Role = max(of, key=lambda role: held.get(role, -1.0))
    seconds = {
        "data": _per_batch(of["data"], times) / reuse,
        "target": _per_batch(of["target"], times) / reuse,
        "drafter": _per_batch(of["drafter"], times, exchange_s),
    }
    shared = sorted({s.device for s in of["target"]} & {s.device for s in of["drafter"]})
    verifiers = sorted(
        stage.name
        for stage in of["verifier"]
        if times[stage.name].share(times[stage.name].busy) > VERIFIER_SHARE
        and stage.device in {s.device for s in of[slowest]}
    )
    bottleneck, phrase = _name(slowest, shared, verifiers, last.share(exchange_s))
    if _launch_bound([times[stage.name] for stage in of[slowest]]):
        phrase += ", held up by their host threads"
    note, split = _advice(of, seconds, shared)
    advice = note or ""
    if split is not None:
        whole = f"{split.targets + split.drafters} GPUs"
        advice = (
            f"{_count(split.targets, 'target')} + {_count(split.drafters, 'drafter')} on these {whole} would give "
            f"{split.gain:.2f} x"
            if split.gain >= WORTH_SAYING
            else f"no split of these {whole} would be faster"
        )
    taken = ", ".join(f"{name} {_milliseconds(value)}" for name, value in seconds.items())
    return Balance(
        step=step,
        steps=steps,
        bottleneck=bottleneck,
        text=f"{phrase}; {advice} (a batch takes one device: {taken})",
        seconds_per_batch=seconds,
        shares={
            stage.name: {
                state: round(times[stage.name].share(getattr(times[stage.name], state)), 4)
                for state in ("busy", "input", "output", "exchange", "other")
            }
            for stage in stages
        },
        targets=len({s.device for s in of["target"]}),
        drafters=len({s.device for s in of["drafter"]}),
        best_targets=split.targets if split else None,
        best_drafters=split.drafters if split else None,
        gain=split.gain if split else None,
    )


def _occupied(times: StageTimes) -> float:
    return times.share(times.occupied)


def _exchange_itself(drafters: list[StageTimes]) -> float:
    """Seconds that every drafter spent in the exchanges, whoever it waited for."""
    waits = [dict(times.exchanges) for times in drafters]
    # By number: a reading may catch one drafter before, another one after the end of the same exchange.
    common = set.intersection(*(set(found) for found in waits))
    return sum(min(found[number] for found in waits) for number in common)


def _per_batch(stages: list[Stage], times: Mapping[str, StageTimes], exchange_s: float = 0.0) -> float:
    """Seconds of one device for one batch: several stages on one device share its time."""
    batches = sum(times[stage.name].batches for stage in stages)
    occupied = sum(times[stage.name].occupied + exchange_s for stage in stages)
    devices = len({stage.device for stage in stages})
    return occupied / max(batches, 1) * devices / len(stages)


def _launch_bound(stages: list[StageTimes]) -> bool:
    """Whether the devices rest for most of the time in which nothing else holds these stages up."""
    return sum(times.other for times in stages) > sum(times.busy for times in stages)


def _name(slowest: Role, shared: list[str], verifiers: list[str], exchange: float) -> tuple[str, str]:
    """(bottleneck, what the log calls it)."""
    if slowest == "data":
        return "data", "data come too slowly"
    if shared:
        return "device", f"{', '.join(shared)} does the targets' and the drafters' work"
    if verifiers:
        return "verifier", f"{', '.join(verifiers)} slows the {slowest}s on its device"
    if slowest == "drafter" and exchange > EXCHANGE_SHARE:
        return "exchange", f"the gradient exchange takes {exchange:.0%} of the drafters' time"
    return slowest, f"{slowest}s are the slowest stage"


def _advice(
    of: Mapping[Role, list[Stage]], seconds: Mapping[str, float], shared: list[str]
) -> tuple[str | None, Split | None]:
    """(why there is no advice, the best split): one of the two."""
    if shared:
        return "no split to advise where they share a device", None
    counts = Counter("gpu" if stage.device.startswith("cuda") else "cpu" for stage in (*of["target"], *of["drafter"]))
    if counts["cpu"]:
        return "no split to advise where a stage runs on the CPU", None
    if min(seconds["target"], seconds["drafter"]) <= 0.0:
        return "too short to time", None
    now = (len({s.device for s in of["target"]}), len({s.device for s in of["drafter"]}))
    return None, best_split(seconds["target"], seconds["drafter"], *now)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
