"""What the pipeline is made of, as the pipeline sees it: small protocols, and the factories of one run.

The pipeline knows threads, channels and order; what a target, a training step or an evaluation does is
behind these. `trainer.assembly` makes the real ones from a TrainConfig.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer.data.batch import HiddenBatch, PackedBatch


class BatchSource(Protocol):
    """Packed batches in the order of their numbers, without end."""

    def __next__(self) -> PackedBatch: ...


class TargetModel(Protocol):
    """The frozen target on one device."""

    def hidden_states(self, packed: PackedBatch) -> torch.Tensor:
        """Outputs of the captured layers side by side, [T, K*H], on the target's device."""
        ...


class StepNumbers(Protocol):
    """The last applied step over all drafters."""

    @property
    def step(self) -> int:
        """Updates so far; fewer than steps where some left the weights alone."""
        ...

    @property
    def loss(self) -> float: ...
    @property
    def accept_len(self) -> float: ...
    @property
    def accuracy(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def updated(self) -> bool:
        """False where the weights stayed as they were: no block carried weight, or the gradient was not finite."""
        ...


class DrafterStep(Protocol):
    """One drafter's training step over persistent buffers; see `trainer.step.TrainStep`."""

    @property
    def grads(self) -> torch.Tensor:
        """Flat [P]: gradients of the loss numerator since the last `apply`. The exchange sums them over drafters."""
        ...

    @property
    def stats(self) -> torch.Tensor:
        """fp32: the sums that belong to them (denominator, hits, blocks, ...), added over all drafters likewise."""
        ...

    def load(self, batch: HiddenBatch) -> None:
        """Copy a batch into the step's own buffers."""
        ...

    def accumulate(self) -> None:
        """Forward and backward of the loaded batch; adds to `grads` and `stats`."""
        ...

    def apply(self) -> None:
        """One optimizer step from both, which are cleared."""
        ...

    def warm_up(self, capturing: Callable[[], None]) -> None:
        """`capturing` is called as the capture of a CUDA graph begins, where there is one."""
        ...

    def metrics(self) -> StepNumbers:
        """Of the last applied step; waits for the device. Raises when something was compiled since the gate opened."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the weights under their published keys."""
        ...

    def fingerprint(self) -> int:
        """A checksum of the weights' bits; replicas have the same."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that an exact resume needs: nested dicts and lists of JSON values and of copies in host memory."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Acceptance on held-out documents."""

    accept_len: float
    """Bonus token included."""
    by_position: list[float]
    """Share of blocks whose first k drafted tokens were all accepted, k = 1..B-1."""
    blocks: int
    decoded: Evaluation | None = None
    """The same from true speculative decoding, where it was done; its blocks are rounds."""


class Evaluate(Protocol):
    """Weights under their published keys -> acceptance."""

    def __call__(self, weights: dict[str, torch.Tensor], *, last: bool) -> Evaluation:
        """`last`: after this no further evaluation comes, so it may take longer."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The factories of one run. Each is called on the thread that will use what it makes."""

    open_source: Callable[[dict[str, Any] | None], BatchSource]
    """From a cursor; None: from the beginning."""
    target: Callable[[int], TargetModel]
    """Target of replica i; the weights were loaded before any thread started."""
    step: Callable[[int], DrafterStep]
    """Training step of drafter i; all start with the same weights."""
    evaluator: Callable[[int], Evaluate]
    """Evaluation on verifier i's device."""
    thread_rules: Callable[[str, str], AbstractContextManager[Any]]
    """(role, device) -> what a thread must enter before any torch work."""
    on_gate_open: Callable[[], None]
    """Runs after the last warm-up, before anyone is let through."""
    warm_target: Callable[[TargetModel], None] | None = None
    """Compiles a target's forward, in a turn of its own at the gate; None: targets compile nothing and have no turn."""
