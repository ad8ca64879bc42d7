"""Our exports in the published packages' own classes: they load, and they compute what our drafter computes.

Both packages pin other versions of half the environment, so they are no dependency: `make test` installs those of
tests/peers.txt beside it with --no-deps. Without them these tests are skipped, and on CI they fail.
"""

from __future__ import annotations

import importlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.test_export import PROVENANCE, drafter_of, shape_of
from trainer.export import export
from trainer.model.drafter import DrafterShape
from trainer.model.mask import attend_sdpa

ANCHOR = 21


def peer(module: str) -> Any:
    """A published package's module; only on a developer's machine may it be absent."""
    return importlib.import_module(module) if os.environ.get("CI") else pytest.importorskip(module)


def inputs(shape: DrafterShape) -> tuple[torch.Tensor, torch.Tensor]:
    """States of the tokens before the anchor, and one block's embeddings."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(ANCHOR, shape.num_features * shape.hidden_size, generator=generator)
    return hidden, torch.randn(shape.block_size, shape.hidden_size, generator=generator)


def ours(shape: DrafterShape) -> torch.Tensor:
    hidden, embeds = inputs(shape)
    attend = attend_sdpa(
        torch.tensor([ANCHOR], dtype=torch.int32),
        torch.tensor([True]),
        torch.zeros(ANCHOR, dtype=torch.int32),
        shape,
    )
    at = ANCHOR + torch.arange(shape.block_size)
    out: torch.Tensor = drafter_of(shape).float()(hidden, torch.arange(ANCHOR), embeds, at, attend)
    return out.detach()


def write(tmp_path: Path, form: Any, shape: DrafterShape) -> Path:
    generator = torch.Generator().manual_seed(6)
    ends = torch.randn(2, shape.vocab_size, shape.hidden_size, generator=generator)
    weights = drafter_of(shape).state_dict()
    return export(weights, shape, PROVENANCE, tmp_path / form, form, embed_VH=ends[0], head_VH=ends[1])


def block_mask(shape: DrafterShape, layer: int) -> torch.Tensor:
    """[1, 1, B, ANCHOR + B] additive, as the packages' eager attention takes it: the rule, written out."""
    window, size = shape.window(layer), shape.block_size
    mask = torch.zeros(1, 1, size, ANCHOR + size)
    for q in range(size):
        for k in range(ANCHOR + size):
            late = k >= ANCHOR and shape.causal(layer) and k > ANCHOR + q
            far = k < ANCHOR and window is not None and k <= ANCHOR + q - window
            if late or far:
                mask[0, 0, q, k] = float("-inf")
    return mask


shapes = pytest.mark.parametrize("shape", [shape_of(), shape_of(sliding=(0, 2))], ids=["full", "mixed"])


@shapes
def test_specforge_loads_the_zlab_form(tmp_path: Path, shape: DrafterShape) -> None:
    """Failed with rope_theta left out of the configuration: the class then rotates by its own default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dflash = peer("specforge.modeling.draft.dflash")
    path = write(tmp_path, "zlab", shape)
    model, report = dflash.DFlashDraftModel.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.block_size == shape.block_size
    assert model.mask_token_id == PROVENANCE.mask_token_id
    assert tuple(model.target_layer_ids) == PROVENANCE.target_layer_ids
    hidden, embeds = inputs(shape)
    kinds = {"full_attention": 1, "sliding_attention": 0}  # in `mixed`, layer 1 is full and layer 0 slides
    with torch.no_grad():
        theirs = model.eval()(
            position_ids=torch.arange(ANCHOR + shape.block_size)[None],
            attention_mask={kind: block_mask(shape, layer) for kind, layer in kinds.items()},
            noise_embedding=embeds[None],
            target_hidden=hidden[None],
        )[0]
    assert torch.allclose(theirs, ours(shape), atol=1e-4)


@shapes
def test_speculators_loads_its_own_form(tmp_path: Path, shape: DrafterShape) -> None:
    """Failed with layer ids that do not count from the embedding, and with a missing proposal."""
    core = peer("speculators.models.dflash.core")
    path = write(tmp_path, "speculators", shape)
    fields = json.loads((path / "config.json").read_text())
    config = core.DFlashSpeculatorConfig.from_dict(fields)
    config.transformer_layer_config._attn_implementation = "eager"
    assert config.aux_hidden_state_layer_ids == [layer + 1 for layer in PROVENANCE.target_layer_ids]
    assert config.speculators_config.proposal_methods[0].speculative_tokens == shape.block_size - 1
    # The package's own constructor goes to the verifier for the weights it shares; the tensors are all here.
    model = core.DFlashDraftModel(config).float().eval()
    tensors = {key: value.float() for key, value in load_file(path / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"}
    assert model.sliding_window_indices == list(shape.config.sliding_layers)
    assert model.sliding_window_non_causal == (not shape.config.sliding_causal)
    hidden, embeds = inputs(shape)
    at = torch.arange(ANCHOR + shape.block_size)[None]
    with torch.no_grad():
        context = model.hidden_norm(model.fc(hidden[None]))
        theirs = embeds[None]
        rope = model.rotary_emb(theirs, at)
        for number, layer in enumerate(model.layers):
            theirs = layer(
                hidden_states=theirs,
                target_hidden=context,
                attention_mask=block_mask(shape, number),
                position_ids=at,
                use_cache=False,
                position_embeddings=rope,
            )
        states = model.norm(theirs)[0]
        logits = model.lm_head(states)
    assert torch.allclose(states, ours(shape), atol=1e-4)
    assert torch.allclose(logits, ours(shape) @ tensors["lm_head.weight"].T, atol=1e-3)
