"""Both published forms: what they say, that they read back, and that a wrong one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.config import DrafterConfig
from trainer.export import (
    ExportError,
    Format,
    export,
    initialise,
    load_export,
)
from trainer.export_forms import Provenance, speculators_config, zlab_config
from trainer.model.drafter import Drafter, DrafterShape

PROVENANCE = Provenance(
    target_name="somewhere/target-27b",
    target_architecture="Qwen3_5ForCausalLM",
    num_target_layers=64,
    target_layer_ids=(1, 31, 61),
    mask_token_id=39,
    max_position_embeddings=4096,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=None,
)


def shape_of(*, sliding: tuple[int, ...] = (), causal: bool = False, heads: int = 4) -> DrafterShape:
    config = DrafterConfig(
        num_layers=3,
        num_heads=heads,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        block_size=4,
        sliding_window=16 if sliding else None,
        sliding_layers=sliding,
        sliding_causal=causal,
    )
    return DrafterShape(hidden_size=24, vocab_size=40, num_features=3, rope_theta=1e7, config=config)


def drafter_of(shape: DrafterShape) -> Drafter:
    return Drafter(shape, torch.Generator().manual_seed(5)).to(torch.bfloat16)


def write(tmp_path: Path, form: Format, shape: DrafterShape) -> Path:
    ends = torch.randn(2, 40, 24)
    return export(
        drafter_of(shape).state_dict(), shape, PROVENANCE, tmp_path / form, form, embed_VH=ends[0], head_VH=ends[1]
    )


forms = pytest.mark.parametrize("form", ["zlab", "speculators"])


@forms
@pytest.mark.parametrize(
    "shape",
    [
        shape_of(),
        shape_of(sliding=(0, 2)),
        shape_of(sliding=(0, 1), causal=True),
        shape_of(sliding=(0, 1, 2), causal=True),
    ],
)
def test_it_reads_back_as_the_same_drafter(tmp_path: Path, form: Format, shape: DrafterShape) -> None:
    loaded = load_export(write(tmp_path, form, shape))
    assert loaded.target_layer_ids == (1, 31, 61)
    assert loaded.mask_token_id == 39
    assert loaded.shape.rope_theta == 1e7
    assert loaded.shape.config.sliding_layers == shape.config.sliding_layers
    assert loaded.shape.config.sliding_causal == shape.config.sliding_causal
    original = drafter_of(shape).state_dict()
    assert loaded.weights.keys() == original.keys()
    assert all(torch.equal(loaded.weights[k], original[k]) for k in original)
    assert not list(tmp_path.glob(".partial*"))


def test_zlab_form_says_what_servers_look_for() -> None:
    config = zlab_config(shape_of(), PROVENANCE)
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["dflash_config"]["target_layer_ids"] == [1, 31, 61]
    assert config["dflash_config"]["mask_token_id"] == 39
    assert config["num_target_layers"] == 64
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e7
    assert config["rope_scaling"] is None
    assert config["hidden_act"] == "silu"
    assert config["is_causal"] is False
    assert config["layer_types"] == ["full_attention"] * 3
    text = json.dumps(config)
    assert "partial_rotary_factor" not in text
    assert "mrope" not in text


@pytest.mark.parametrize(
    ("sliding", "causal", "said"),
    [
        ((), False, False),
        ((0, 1, 2), False, False),
        ((0, 1), False, False),
        ((0, 1, 2), True, True),
        ((0, 1), True, None),
    ],
)
def test_causality_is_written_or_left_to_the_servers_own_rule(
    sliding: tuple[int, ...], causal: bool, said: bool | None
) -> None:
    """Absent means: sliding layers causal, full layers not. Failed when a mixed drafter wrote true."""
    config = zlab_config(shape_of(sliding=sliding, causal=causal), PROVENANCE)
    assert config.get("is_causal") is said
    assert config["layer_types"] == ["sliding_attention" if i in sliding else "full_attention" for i in range(3)]
    assert config["sliding_window"] == (16 if sliding else None)


def test_speculators_form_counts_layers_from_the_embedding() -> None:
    """Failed with our own ids: the off-by-one that costs all acceptance."""
    config = speculators_config(shape_of(), PROVENANCE)
    assert config["aux_hidden_state_layer_ids"] == [2, 32, 62]
    (proposal,) = config["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == 3
    assert config["sample_from_anchor"] is False
    assert config["transformer_layer_config"]["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e7}


def test_what_each_form_holds(tmp_path: Path) -> None:
    own = set(drafter_of(shape_of()).state_dict())
    assert set(load_file(write(tmp_path, "zlab", shape_of()) / "model.safetensors")) == own
    assert set(load_file(write(tmp_path, "speculators", shape_of()) / "model.safetensors")) == own | {
        "embed_tokens.weight",
        "lm_head.weight",
    }


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("damage", ["missing key", "unknown key", "shape", "config", "no file", "cut"])
def test_a_damaged_export_is_refused(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path, "zlab", shape_of())
    weights = path / "model.safetensors"
    tensors = load_file(weights)
    if damage == "missing key":
        save_file({k: v for k, v in tensors.items() if k != "fc.weight"}, weights)
    elif damage == "unknown key":
        save_file({("model." + k if k == "norm.weight" else k): v for k, v in tensors.items()}, weights)
    elif damage == "shape":
        edit_config(path, num_attention_heads=8)
    elif damage == "config":
        edit_config(path, dflash_config={})
    elif damage == "no file":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ExportError):
        load_export(path)


def test_weights_that_are_not_finite_are_not_published(tmp_path: Path) -> None:
    weights = drafter_of(shape_of()).state_dict()
    weights["fc.weight"] = weights["fc.weight"].clone()
    weights["fc.weight"][0, 0] = float("nan")
    with pytest.raises(ExportError, match=r"fc\.weight"):
        export(weights, shape_of(), PROVENANCE, tmp_path / "out", "zlab")
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_never_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path, "zlab", shape_of())
    with pytest.raises(ExportError, match="exists"):
        export(drafter_of(shape_of()).state_dict(), shape_of(), PROVENANCE, path, "zlab")
    load_export(path)


@forms
def test_a_drafter_starts_from_an_export(tmp_path: Path, form: Format) -> None:
    path = write(tmp_path, form, shape_of())
    drafter = Drafter(shape_of(), torch.Generator().manual_seed(99))
    initialise(drafter, path, (1, 31, 61))
    assert torch.equal(drafter.fc.weight, drafter_of(shape_of()).fc.weight.float())


@pytest.mark.parametrize(
    ("shape", "layers", "word"),
    [
        (shape_of(heads=8), (1, 31, 61), "num_heads"),
        (shape_of(sliding=(0,)), (1, 31, 61), "sliding_layers"),
        (shape_of(), (1, 31, 60), "target layers"),
    ],
)
def test_starting_from_another_drafter_names_what_differs(
    tmp_path: Path, shape: DrafterShape, layers: tuple[int, ...], word: str
) -> None:
    path = write(tmp_path, "zlab", shape_of())
    with pytest.raises(ExportError, match=word):
        initialise(Drafter(shape), path, layers)
