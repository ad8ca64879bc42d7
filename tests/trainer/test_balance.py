"""Which stage holds a run up, and the advice: against brute force and against pipelines whose stage times are known.

Shown able to fail: with the drafters' longest exchange in place of the shortest, pipelines of known times get another
bottleneck; with the split's rate as a sum instead of the slower side's, brute force finds better splits.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.balance import MIN_STEPS, BalanceWatch, Split, Stage, best_split, judge, stages_of
from trainer.config import TopologyConfig
from trainer.events import human
from trainer.stages.clock import HostTimeline, StageClock, StageTimes

seconds = st.integers(1, 400).map(lambda n: n / 64)  # exact in binary, so that ties are ties


class TestTheSplit:
    @given(seconds, seconds, st.integers(1, 12), st.integers(1, 12))
    def test_no_split_of_the_same_gpus_is_faster(self, t: float, d: float, targets: int, drafters: int) -> None:
        found = best_split(t, d, targets, drafters)
        total = targets + drafters

        def rate(count: int) -> Fraction:
            return min(Fraction(count) / Fraction(t), Fraction(total - count) / Fraction(d))

        fastest = max(rate(count) for count in range(1, total))
        assert found.targets + found.drafters == total
        assert min(found.targets, found.drafters) >= 1
        assert float(rate(found.targets)) == pytest.approx(float(fastest))
        assert found.gain == pytest.approx(float(fastest / rate(targets)))
        nearest = min(abs(count - targets) for count in range(1, total) if rate(count) == fastest)
        assert found.gain > 1.0 or found.targets == targets
        assert abs(found.targets - targets) == nearest or float(rate(found.targets)) == pytest.approx(float(fastest))

    def test_three_to_one_and_where_nothing_is_to_gain(self) -> None:
        assert best_split(0.3, 0.1, 1, 3) == Split(3, 1, pytest.approx(3.0))
        assert best_split(0.3, 0.1, 3, 1) == Split(3, 1, 1.0)


@dataclass(frozen=True)
class Line:
    """A pipeline of known stage times, run in time of its own."""

    data: float
    target: float
    drafter: float
    exchange: float
    targets: int
    drafters: int
    depth: int = 2

    def demand(self) -> dict[str, float]:
        """Seconds of each stage for one batch: the largest is the bottleneck."""
        return {
            "data": self.data,
            "target": self.target / self.targets,
            "drafter": (self.drafter + self.exchange) / self.drafters,
        }

    def times(self, steps: int) -> dict[str, StageTimes]:
        """By the rule that batch i goes through target i mod T to drafter i mod D, over bounded channels."""
        spans: dict[str, list[tuple[str, float]]] = defaultdict(list)  # stage -> (state, when it ends)
        free: dict[str, float] = defaultdict(float)
        taken: dict[tuple[str, str], list[float]] = defaultdict(list)

        def put(stage: str, channel: tuple[str, str], count: dict[tuple[str, str], int]) -> float:
            before = count[channel] - self.depth
            count[channel] += 1
            done = max(free[stage], taken[channel][before] if before >= 0 else 0.0)
            spans[stage].append(("output", done))
            free[stage] = done
            return done

        def work(stage: str, state: str, length: float) -> None:
            free[stage] += length
            spans[stage].append((state, free[stage]))

        count: dict[tuple[str, str], int] = defaultdict(int)
        for step in range(steps):
            for d in range(self.drafters):
                index = step * self.drafters + d
                t = f"target{index % self.targets}"
                drafter = f"drafter{d}"
                work("prefetcher", "busy", self.data)
                there = put("prefetcher", ("prefetcher", t), count)
                free[t] = max(free[t], there)
                spans[t].append(("input", free[t]))
                taken["prefetcher", t].append(free[t])
                work(t, "busy", self.target)
                there = put(t, (t, drafter), count)
                free[drafter] = max(free[drafter], there)
                spans[drafter].append(("input", free[drafter]))
                taken[t, drafter].append(free[drafter])
                work(drafter, "busy", self.drafter)
            last = max(free[f"drafter{d}"] for d in range(self.drafters)) + self.exchange
            for d in range(self.drafters):
                free[f"drafter{d}"] = last
                spans[f"drafter{d}"].append(("exchange", last))
        found = {"verifier0": StageTimes(input=max(free.values()))}
        for stage, pieces in spans.items():
            now = [0.0]
            clock = StageClock(timeline=HostTimeline(lambda now=now: now[0]))  # type: ignore[misc]  # a default binds it
            for state, end in pieces:
                with clock.state(state, batch=state == "busy"):  # type: ignore[arg-type]  # they are states
                    now[0] = end
            found[stage] = clock.read()
        return found

    def stages(self, *, verifier: str = "cuda:99") -> tuple[Stage, ...]:
        devices = [f"cuda:{n}" for n in range(self.targets + self.drafters)]
        return stages_of(
            TopologyConfig(
                target=tuple(devices[: self.targets]), drafter=tuple(devices[self.targets :]), verifier=(verifier,)
            )
        )


lines = st.builds(
    Line,
    data=seconds,
    target=seconds,
    drafter=seconds,
    exchange=st.sampled_from([0.0, 0.015625]),
    targets=st.integers(1, 4),
    drafters=st.integers(1, 4),
)


class TestTheBottleneck:
    @settings(max_examples=60, deadline=None)
    @given(lines)
    def test_is_the_stage_with_the_longest_demand(self, line: Line) -> None:
        demand = sorted(line.demand().items(), key=lambda item: item[1])
        if demand[-1][1] < 1.25 * demand[-2][1] or line.exchange > 0.2 * line.drafter:
            return
        found = judge(line.stages(), line.times(120), step=120, steps=120)
        assert found.bottleneck == demand[-1][0]
        assert found.seconds_per_batch == pytest.approx(
            {"data": line.data, "target": line.target, "drafter": line.drafter + line.exchange}
        )
        best = best_split(line.target, line.drafter + line.exchange, line.targets, line.drafters)
        assert (found.best_targets, found.best_drafters) == (best.targets, best.drafters)

    def test_a_starved_drafter_that_waits_for_its_neighbour_does_not_blame_the_exchange(self) -> None:
        """Drafter 0 has its batch a forward earlier, then waits in the exchange: for the target, not for the wire."""
        line = Line(0.01, 1.0, 0.2, 0.0, targets=1, drafters=2)
        times = line.times(60)
        assert times["drafter0"].share(times["drafter0"].exchange) > 0.4
        assert judge(line.stages(), times, step=60, steps=60).bottleneck == "target"

    def test_an_exchange_that_takes_most_of_a_step_is_the_exchange(self) -> None:
        line = Line(0.01, 0.05, 0.2, 0.5, targets=1, drafters=2)
        found = judge(line.stages(), line.times(60), step=60, steps=60)
        assert found.bottleneck == "exchange"
        assert "71%" in found.text

    def test_a_verifier_on_the_slow_stages_device_is_named_and_elsewhere_not(self) -> None:
        line = Line(0.01, 1.0, 0.2, 0.0, targets=1, drafters=1)
        times = line.times(60) | {"verifier0": StageTimes(busy=20.0, input=40.0)}
        assert judge(line.stages(verifier="cuda:0"), times, step=60, steps=60).bottleneck == "verifier"
        assert judge(line.stages(verifier="cuda:1"), times, step=60, steps=60).bottleneck == "target"
        idle = times | {"verifier0": StageTimes(busy=1.0, input=59.0)}
        assert judge(line.stages(verifier="cuda:0"), idle, step=60, steps=60).bottleneck == "target"

    def test_a_shared_device_is_named_and_no_split_advised(self) -> None:
        line = Line(0.01, 1.0, 1.0, 0.0, targets=1, drafters=1)
        stages = stages_of(TopologyConfig(target=("cuda:0",), drafter=("cuda:0",), verifier=("cuda:0",)))
        found = judge(stages, line.times(60), step=60, steps=60)
        assert (found.bottleneck, found.best_targets, found.gain) == ("device", None, None)
        assert "cuda:0" in found.text
        assert "no split" in found.text

    def test_data_stay_named_where_the_rest_shares_a_device(self) -> None:
        line = Line(3.0, 1.0, 1.0, 0.0, targets=1, drafters=1)
        stages = stages_of(TopologyConfig(target=("cuda:0",), drafter=("cuda:0",), verifier=()))
        assert judge(stages, line.times(60), step=60, steps=60).bottleneck == "data"

    def test_two_drafters_of_one_device_share_its_time(self) -> None:
        """Each seems to take twice as long; the device does not."""
        line = Line(0.01, 0.1, 1.0, 0.0, targets=1, drafters=2)
        stages = stages_of(TopologyConfig(target=("cuda:0",), drafter=("cuda:1", "cuda:1"), verifier=("cuda:0",)))
        found = judge(stages, line.times(60), step=60, steps=60)
        assert found.seconds_per_batch["drafter"] == pytest.approx(0.5)
        assert (found.targets, found.drafters) == (1, 1)

    def test_reuse_spreads_a_targets_time_over_the_batches_that_are_trained_on(self) -> None:
        line = Line(0.03, 0.9, 0.1, 0.0, targets=2, drafters=1)
        found = judge(line.stages(), line.times(60), step=60, steps=60, reuse=3)
        assert found.seconds_per_batch == pytest.approx({"data": 0.01, "target": 0.3, "drafter": 0.1})


class TestWhenItSpeaks:
    line = Line(0.01, 1.0, 0.2, 0.0, targets=1, drafters=3)

    def watch(self) -> BalanceWatch:
        return BalanceWatch(self.line.stages(), log_every=1)

    def test_never_on_too_little(self) -> None:
        watch = self.watch()
        for step in range(1, 20):
            watch.add(1, self.line.times(1))
            assert watch.due(step, last=True) is None

    def test_first_when_it_can_then_at_intervals_and_at_the_end(self) -> None:
        watch, spoke = BalanceWatch(self.line.stages(), log_every=4), []
        for step in range(1, 201):
            watch.add(1, self.line.times(1))
            if watch.due(step):
                spoke.append(step)
        assert spoke == [25, 65, 105, 145, 185]
        assert watch.due(200, last=True) is None
        for _ in range(MIN_STEPS):
            watch.add(1, self.line.times(1))
        assert watch.due(201, last=True) is not None

    def test_a_target_with_too_few_batches_keeps_it_silent(self) -> None:
        line = Line(0.01, 1.0, 0.2, 0.0, targets=4, drafters=1)
        watch = BalanceWatch(line.stages(), log_every=1)
        watch.add(5, {})
        watch.add(36, line.times(36))
        assert watch.due(41) is None
        watch.add(4, line.times(4))
        assert watch.due(45) is not None

    def test_one_line_with_the_advice(self) -> None:
        found = judge(self.line.stages(), self.line.times(60), step=60, steps=60)
        (text,) = human(found)
        assert text == (
            "balance   step 60: targets are the slowest stage; 3 targets + 1 drafter on these 4 GPUs would give 3.00 x "
            "(a batch takes one device: data 10 ms, target 1,000 ms, drafter 200 ms)"
        )
