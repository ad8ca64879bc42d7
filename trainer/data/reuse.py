"""data.reuse: a drafter trains k times on each batch of hidden states, each time with anchors of its own.

Every drafter keeps a small reservoir of batches and follows one fixed schedule. In its period p it takes its batch p
from the target and trains on

    batch p, the first time;  batch p - s, the second time;  ...  batch p - (k - 1) s, the k-th time

so it takes one batch for k that it trains on, evenly, and the repetitions of a batch lie k s + 1 places apart (fewer in
the first periods, which have fewer old batches; never next to each other). A batch leaves the reservoir after its k-th
time. Batches, periods and places are the drafter's own: its batch q is batch q D + rank of the run. What is where
follows from the number of the place alone, so a resume needs the place and the data cursor from before the oldest batch
that is still needed; the target computes those in the reservoir again.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import ConfigError, DataConfig, TrainConfig


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """The schedule. `times` is k, `spacing` s; with k = 1 place and batch are the same."""

    times: int
    spacing: int = 1

    @classmethod
    def of(cls, config: DataConfig) -> ReusePlan:
        """As wide as the reservoir allows: it holds (k - 1) s + 1 batches."""
        if config.reuse == 1:
            return cls(1)
        return cls(config.reuse, ((config.reuse_reservoir or config.reuse) - 1) // (config.reuse - 1))

    @property
    def reservoir(self) -> int:
        """Batches that are held at once."""
        return (self.times - 1) * self.spacing + 1

    def at(self, place: int) -> tuple[int, int]:
        """(batch, how many times it was trained on before) at a place, both from 0."""
        period, before = self._period(place)
        return period - before * self.spacing, before

    def oldest(self, place: int) -> int:
        """The first batch that this place or a later one needs."""
        return max(0, self._period(place)[0] - (self.times - 1) * self.spacing)

    def taken(self, places: int) -> int:
        """Batches taken from the target in the first `places` places."""
        return self._period(places - 1)[0] + 1 if places else 0

    def _period(self, place: int) -> tuple[int, int]:
        """(period, place in it). The first periods are shorter: batches before number 0 do not exist."""
        full = (self.times - 1) * self.spacing
        ramp = self.spacing * self.times * (self.times - 1) // 2
        if place >= ramp:
            periods, rest = divmod(place - ramp, self.times)
            return full + periods, rest
        # Before: s periods with one place each, s with two, and so on.
        width = 1
        while place >= self.spacing * width:
            place -= self.spacing * width
            width += 1
        periods, rest = divmod(place, width)
        return (width - 1) * self.spacing + periods, rest


def check_reuse(config: TrainConfig) -> None:
    """Raises ConfigError where the reservoir is so wide that the run would end before any batch came again."""
    if config.data.reuse_reservoir is None:
        return
    plan, places = ReusePlan.of(config.data), config.run.max_steps * config.optim.micro_steps
    if plan.spacing + 2 > places:
        raise ConfigError(
            f"data.reuse_reservoir={config.data.reuse_reservoir} lets {plan.spacing} batches pass before one is "
            f"trained on again, and this run has {places} of each drafter: nothing would be reused; "
            "lower it, or leave it out"
        )
