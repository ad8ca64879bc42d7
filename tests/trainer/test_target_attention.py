"""Attention taken apart, against transformers' own module with the same attention function: packed rows, compiled too.

Seen to fail: the gated one with query and gate exchanged; both with keys that were not rotated; the sliding one without
its window; the count of graphs with the bounds as an argument of `turn`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from trainer import torch_setup
from trainer.model.document_attention import document_bounds, register
from trainer.model.target_attention import Attention, known_attention
from trainer.model.tokenwise import Tokenwise

CPU = torch.device("cpu")
HIDDEN = 32
HEAD = 16
LENGTHS = (5, 1, 23, 3)


def attention(kind: str) -> Any:
    """transformers' module with random weights: gated with a partial rotation, plain, and with a sliding window."""
    import transformers
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention

    common = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD}
    make: Any = Qwen3Attention
    if kind == "gated":
        config: Any = transformers.Qwen3_5TextConfig(**common, num_hidden_layers=4)
        make = Qwen3_5Attention
    else:
        sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
        config = transformers.Qwen3Config(**common, num_hidden_layers=1, **(sliding if kind == "sliding" else {}))
    config._attn_implementation = register()
    torch.manual_seed(5)
    mixer = make(config, 3 if kind == "gated" else 0)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer.eval().requires_grad_(False)


def inputs(kind: str, lengths: Sequence[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states and the rotation of each token; a quarter of each head rotates in the gated one."""
    width = HEAD // 4 if kind == "gated" else HEAD
    place = torch.cat([torch.arange(length) for length in lengths]).float()
    angle = place[:, None] * 10.0 ** -torch.arange(width // 2)
    angle = torch.cat([angle, angle], dim=-1)[None]
    x = torch.randn(1, len(place), HIDDEN, generator=torch.Generator().manual_seed(len(place)))
    return x, (angle.cos(), angle.sin())


def run(mixer: Any, kind: str, lengths: Sequence[int]) -> torch.Tensor:
    x, rotation = inputs(kind, lengths)
    with document_bounds(list(itertools.accumulate(lengths, initial=0))):
        return mixer(hidden_states=x, position_embeddings=rotation, attention_mask=None)[0]  # type: ignore[no-any-return]


KINDS = ("gated", "plain", "sliding")


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_row(kind: str) -> None:
    mixer = attention(kind)
    assert known_attention(mixer)
    found = run(Attention(mixer, Tokenwise(CPU)), kind, LENGTHS)
    assert torch.allclose(found, run(mixer, kind, LENGTHS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "graphs"), [("gated", 2), ("plain", 1)])
def test_compiled_rows_of_other_documents(kind: str, graphs: int) -> None:
    torch_setup.apply_torch_config()
    mixer, tokenwise = attention(kind), Tokenwise(CPU)
    tokenwise.tokens = sum(LENGTHS)
    shell = Attention(mixer, tokenwise)
    before = torch_setup.compile_counts()
    with tokenwise.row(tokenwise.tokens):
        run(shell, kind, (tokenwise.tokens,))
        assert torch_setup.compile_counts().graphs - before.graphs == graphs
        torch_setup.forbid_compilation()
        try:
            for lengths in (LENGTHS, LENGTHS[::-1], (30, 2)):
                found, expected = run(shell, kind, lengths), run(mixer, kind, lengths)
                assert torch.allclose(found, expected, atol=1e-5, rtol=1e-5)
            torch_setup.check_nothing_compiled()
        finally:
            torch_setup.allow_compilation()


def test_other_makes_stay_as_they_are() -> None:
    """One that looks the same from outside: Gemma 3, with a window and a scale of its own."""
    import transformers
    from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention

    config = transformers.Gemma3TextConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    assert not known_attention(Gemma3Attention(config, 0))
