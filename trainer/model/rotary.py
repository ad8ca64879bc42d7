"""Rotary position embedding: plain neox, over the whole head, tables in fp32.

Shape legend: S positions, D head size, R = D / 2, T context tokens, Q block positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

Rope = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of some positions, each fp32 [S, R]."""


class Ropes(NamedTuple):
    """Tables of one batch, made outside the compiled forward: inside, every element would work out its own angle."""

    context: Rope
    """Of T positions."""
    block: Rope
    """Of Q positions."""


class Rotary(nn.Module):
    """Plain neox rotary embedding over the whole head; frequencies stay fp32 whatever the weights become."""

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)

    def _frequencies(self) -> torch.Tensor:
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return 1.0 / (self.theta**exponent)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Rotary:
        # Module.to(bfloat16) would round the frequencies, which costs acceptance at long positions: move, never cast.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves _apply unannotated
        self.inv_freq = self._frequencies().to(self.inv_freq.device)
        return self

    def forward(self, positions_S: torch.Tensor) -> Rope:
        """cos and sin, each fp32 [S, R]: both halves of a head turn by the same angles."""
        angles = positions_S.float().unsqueeze(-1) * self.inv_freq
        return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos_SR: torch.Tensor, sin_SR: torch.Tensor) -> torch.Tensor:
    """Rotate heads [S, heads, D] by their positions; arithmetic in fp32, result in the input's type."""
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = cos_SR[:, None], sin_SR[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
