"""Both attentions against a naive softmax over the pairwise mask, and the refusals that keep FlexAttention compiled.

Seen to fail: chunks that reuse the first chunk's keys, an unused slot that was not zeroed, the guard with
`is_compiling` always true.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from torch._higher_order_ops.flex_attention import flex_attention as forward_operator
from torch._higher_order_ops.flex_attention import flex_attention_backward as backward_operator
from torch.nn.attention.flex_attention import flex_attention

from tests.trainer.mask_cases import cases, pairwise_mask
from trainer import torch_setup
from trainer.config import DrafterConfig
from trainer.model.attention import (
    DenseFallbackError,
    FlexAttention,
    SdpaAttention,
    compiled_flex_attention,
    layer_layouts,
    make_attention,
)
from trainer.model.block_tables import MaskLayout

CPU = torch.device("cpu")


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    weights = torch.nan_to_num(scores.softmax(-1))
    return weights @ v


def random_qkv(layout: MaskLayout, heads: int = 4, kv_heads: int = 2, dim: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((heads, layout.queries, dim), (kv_heads, layout.keys, dim), (kv_heads, layout.keys, dim))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_chunked_sdpa_equals_the_naive_softmax_with_gradients(case) -> None:
    layout, batch = case
    attention = SdpaAttention([layout], chunk_queries=3 * layout.block_size)
    attention.fill(**batch)
    mask = pairwise_mask(layout, batch)
    q, k, v = random_qkv(layout)
    out = attention(0, q, k, v)
    expected = naive(q, k, v, mask)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    assert torch.all(out[:, ~mask.any(-1)] == 0)
    upstream = torch.randn_like(out)
    mine = torch.autograd.grad(out, (q, k, v), upstream)
    # A naive softmax gives NaN gradients in empty rows; they have no part in the result.
    visible = naive(q[:, mask.any(-1)], k, v, mask[mask.any(-1)])
    theirs = torch.autograd.grad(visible, (q, k, v), upstream[:, mask.any(-1)], allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-8, atol=1e-10)


def test_sliding_layers_get_the_window_and_the_others_do_not() -> None:
    config = DrafterConfig(
        num_layers=3, num_heads=4, num_kv_heads=2, sliding_window=7, sliding_layers=(1,), sliding_causal=True
    )
    layouts = layer_layouts(config, context=64, slots=4)
    assert [x.window for x in layouts] == [None, 7, None]
    assert [x.causal for x in layouts] == [False, True, False]
    flex = FlexAttention(layouts, CPU)
    assert flex.masks[0] is flex.masks[2]
    assert flex.masks[0] is not flex.masks[1]


def test_flex_outside_torch_compile_is_refused() -> None:
    layout = MaskLayout(context=128, slots=8, block_size=16)
    flex = FlexAttention([layout], CPU)
    q, k, v = (x.float() for x in random_qkv(layout))
    with pytest.raises(DenseFallbackError, match=r"outside torch\.compile"):
        flex(0, q, k, v)


def test_a_poisoned_dense_kernel_refuses_the_plain_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for operator in (forward_operator, backward_operator):
        monkeypatch.setattr(operator, "py_kernels", dict(operator.py_kernels))
        monkeypatch.setattr(operator, "_dispatch_cache", {})
    torch_setup.poison_dense_flex()
    layout = MaskLayout(context=128, slots=8, block_size=16)
    with torch.no_grad(), pytest.raises(DenseFallbackError, match="not compiled"):
        flex_attention(*(x.float()[None] for x in random_qkv(layout)), enable_gqa=True)


def test_a_compiled_call_with_our_tables_equals_sdpa() -> None:
    """Forward only: FlexAttention has no backward on a CPU. The tables decide what the kernel visits.

    Broken by emptying the full tables: rows then miss most of their context.
    """
    layout = MaskLayout(context=600, slots=20, block_size=16, window=170)
    first, second, third = [3, 9, 77, 130, 149, 150, 151, 260], list(range(280, 360, 10)), [399, 450, 599]
    batch = {
        "anchors_N": torch.tensor([*first, *second, *third, 600], dtype=torch.int32),
        "keep_N": torch.arange(20) < 19,
        "doc_ids_T": torch.tensor([0] * 400 + [1] * 200, dtype=torch.int32),
        "cu_seqlens_D1": torch.tensor([0, 400, 600, 600], dtype=torch.int32),
    }
    layouts = [layout, MaskLayout(context=600, slots=20, block_size=16)]
    flex, sdpa = FlexAttention(layouts, CPU), SdpaAttention(layouts)
    flex.fill(**batch)
    sdpa.fill(**batch)
    q, k, v = (x.detach().float() for x in random_qkv(layout, dim=16))

    def both(attend: FlexAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x[0] for x in (q, k, v))  # Inductor's CPU kernel refuses views that only become 4-dimensional
        return torch.stack([attend(0, q, k, v), attend(1, q, k, v)])

    torch_setup.apply_torch_config()
    with torch.no_grad():
        out = torch.compile(both, fullgraph=True, dynamic=False)(flex, q[None], k[None], v[None])
        expected = torch.stack([sdpa(0, q, k, v), sdpa(1, q, k, v)])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_on_a_cpu_flex_is_replaced_by_its_twin() -> None:
    layouts = [MaskLayout(context=32, slots=2, block_size=4)]
    assert isinstance(make_attention("flex", layouts, CPU), SdpaAttention)
    assert isinstance(make_attention("sdpa", layouts, CPU), SdpaAttention)
    assert callable(compiled_flex_attention)
