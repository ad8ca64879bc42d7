"""The target's attention over a packed row: each document by itself, causal, no mask in memory.

Registered with transformers under a name of its own, for which transformers then builds no mask: a dense one
for 49,152 tokens would take 2.4 GB and rule out the fast kernels.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "documents"


class _Bounds(threading.local):
    """Document bounds of the row that this thread is running; None: one sequence."""

    value: list[int] | None = None
    masks: dict[tuple[int, int], torch.Tensor] | None = None
    """Sliding masks of this row by (length, window): the same for all of its layers."""


_bounds = _Bounds()


@contextmanager
def document_bounds(bounds: list[int]) -> Iterator[None]:
    """Attention of this thread sees documents [bounds[i], bounds[i+1]) by themselves."""
    _bounds.value, _bounds.masks = bounds, {}
    try:
        yield
    finally:
        _bounds.value = _bounds.masks = None


def current_bounds() -> list[int] | None:
    """The bounds that this thread's row has; None outside of `document_bounds`."""
    return _bounds.value


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[queries, keys], the last query at the last key; a window counts the query's own place."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None, window: int | None
) -> torch.Tensor:
    """One causal sequence [b, h, q, D] over [b, g, k, D]; earlier keys may come from a cache."""
    queries, keys = q.shape[2], k.shape[2]
    if queries == keys and (window is None or keys <= window):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    mask = _sliding_mask(queries, keys, window, q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _sliding_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    masks = _bounds.masks
    if masks is None or queries != keys or window is None:
        return causal_mask(queries, keys, window, device)
    if (queries, window) not in masks:
        masks[queries, window] = causal_mask(queries, keys, window, device)
    return masks[queries, window]


def document_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: returns [b, q, h, D]."""
    if attention_mask is not None or rest.get("softcap") is not None:
        raise ValueError("the trainer's target attention takes neither a mask nor soft-capped scores")
    bounds = _bounds.value
    if bounds is None:
        return attend(query, key, value, scale=scaling, window=sliding_window).transpose(1, 2).contiguous(), None
    # Fused kernels give [b, q, h, D] seen as [b, h, q, D]: joined along q of the former, a row is copied once.
    parts = [
        attend(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scale=scaling, window=sliding_window).transpose(1, 2)
        for a, b in itertools.pairwise(bounds)
    ]
    return torch.cat(parts, dim=1).contiguous(), None


def register() -> str:
    """Make the attention known to transformers; returns the name to ask for."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, document_attention)
    return NAME
