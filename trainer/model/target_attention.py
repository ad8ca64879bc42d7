"""Attention of the frozen target, taken apart: what every token does by itself is compiled where its row is.

Before the scores: the norms of queries and keys and their rotation (`turn`). After them, in Qwen3.5: the output gate,
with the projection behind it (`let_through`). The scores themselves are document_attention.py's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer.model.document_attention import document_attention
from trainer.model.tokenwise import Tokenwise

KNOWN = ("Qwen3Attention", "Qwen3_5Attention")
"""transformers' classes whose forward this is. Others look the same from outside and rotate some layers only."""


class Turn(nn.Module):
    """What `turn` needs, nothing else: the compiled function guards on what it is given."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.q_norm, self.k_norm = mixer.q_norm, mixer.k_norm
        self.rotate: Callable[..., Any] = sys.modules[type(mixer).__module__].apply_rotary_pos_emb


def turn(
    parts: Turn, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [1, T, h, D] and keys [1, T, g, D], normed and rotated by their positions; both contiguous."""
    q, k = parts.rotate(parts.q_norm(q), parts.k_norm(k), cos, sin, unsqueeze_dim=2)
    return q.contiguous(), k.contiguous()


def let_through(o_proj: nn.Module, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The layer's output [1, T, H] from what attention gave and its gate, both [1, T, h, D]."""
    return o_proj((out * gate.sigmoid()).flatten(2))  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


class Attention(nn.Module):
    """A shell of a transformers attention module without a cache; shares every weight with it."""

    def __init__(self, mixer: Any, tokenwise: Tokenwise) -> None:
        super().__init__()
        self.turn = Turn(mixer)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj
        self.head_dim, self.groups = int(mixer.head_dim), int(mixer.num_key_value_groups)
        self._scaling, self._window = mixer.scaling, getattr(mixer, "sliding_window", None)
        self._tokenwise = tokenwise

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> tuple[torch.Tensor, None]:
        by_head = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states).view(by_head)
        k = k.view(by_head)
        gate = None
        if q.shape[-1] == 2 * k.shape[2] * self.groups * self.head_dim:  # each head's query, then its gate
            q, gate = q.view(*by_head[:-1], 2 * self.head_dim).chunk(2, dim=-1)
        q, k = self._tokenwise(turn, self.turn, q.view(by_head), k, *position_embeddings)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, _none = document_attention(self, q, k, v, None, scaling=self._scaling, sliding_window=self._window)
        if gate is None:
            return self.o_proj(out.flatten(2)), None
        return self._tokenwise(let_through, self.o_proj, out, gate), None


def known_attention(mixer: Any) -> bool:
    """Whether `Attention` can stand for this module (the trial at load compares the numbers)."""
    return type(mixer).__name__ in KNOWN and hasattr(sys.modules[type(mixer).__module__], "apply_rotary_pos_emb")
