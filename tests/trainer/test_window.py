"""Gathered windows equal masked rows: two ways to the same attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.trainer.mask_cases import cases
from trainer.model import attention as attention_module
from trainer.model.attention import SdpaAttention


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_gathered_equals_masked_in_value_and_gradient(case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown to fail: a window counted from the anchor instead of the query, a document bound left out of the mask,
    causality inside the block left out."""
    layout, batch = case
    if layout.window is None:
        return
    generator = torch.Generator().manual_seed(1)
    shapes = ((4, layout.queries, 8), (2, layout.keys, 8), (2, layout.keys, 8))
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    upstream = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    results = []
    for limit in (0, 10**6):
        monkeypatch.setattr(attention_module, "GATHER_LIMIT", limit)
        attention = SdpaAttention([layout], chunk_queries=2 * layout.block_size)
        attention.fill(**batch)
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attention(0, *leaves)
        out.backward(upstream)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for masked, gathered in zip(*results, strict=True):
        torch.testing.assert_close(gathered, masked, rtol=1e-9, atol=1e-11)
