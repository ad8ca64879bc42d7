"""config.json of the two published forms of a drafter, written and read.

zlab         Qwen3-style body at the top level, `dflash_config` beside it; target layers count from 0
speculators  the body nested; target layers count from the embedding, so they are ours + 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.config import DrafterConfig
from trainer.model.drafter import DrafterShape
from trainer.model.targets import Target

SPECULATORS_VERSION = "0.5.0"
"""The first version whose DFlash configuration has these fields."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What an export says about the target that its drafter belongs to."""

    target_name: str
    target_architecture: str
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    @classmethod
    def of(cls, target: Target, config: DrafterConfig) -> Provenance:
        """Read off a loaded target. Raises TargetError when no MASK token is known."""
        text = target.model.config.get_text_config()
        end = text.eos_token_id
        return cls(
            target_name=target.name,
            target_architecture=type(target.model).__name__,
            num_target_layers=target.num_layers,
            target_layer_ids=target.layer_ids,
            mask_token_id=target.mask_token(config),
            max_position_embeddings=int(text.max_position_embeddings),
            bos_token_id=text.bos_token_id,
            eos_token_id=end[0] if isinstance(end, list) else end,
            pad_token_id=text.pad_token_id,
        )


def draft_model_config(shape: DrafterShape, provenance: Provenance) -> dict[str, Any]:
    """The Qwen3-style body, as both forms write it.

    Rotary embedding is plain and over the whole head; nothing partial, sectioned or scaled is taken from the
    target, for a server would apply it and the drafter would accept nothing.
    """
    config = shape.config
    kinds = [
        "sliding_attention" if shape.window(layer) is not None else "full_attention"
        for layer in range(config.num_layers)
    ]
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": provenance.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "layer_types": kinds,
        "sliding_window": config.sliding_window if config.sliding_layers else None,
        "use_sliding_window": bool(config.sliding_layers),
        "max_window_layers": config.num_layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": provenance.bos_token_id,
        "eos_token_id": provenance.eos_token_id,
        "pad_token_id": provenance.pad_token_id,
    }


def zlab_config(shape: DrafterShape, provenance: Provenance) -> dict[str, Any]:
    """config.json of the z-lab form."""
    config = shape.config
    written = {
        "architectures": ["DFlashDraftModel"],
        **draft_model_config(shape, provenance),
        "num_target_layers": provenance.num_target_layers,
        "dtype": "bfloat16",
        # Servers look for it in either place.
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": provenance.mask_token_id,
            "target_layer_ids": list(provenance.target_layer_ids),
            "block_size": shape.block_size,
        },
    }
    # `is_causal` speaks for all layers. A drafter with causal sliding layers beside bidirectional full ones is what
    # servers assume when it is absent; in every other case it is said outright.
    if not (config.sliding_causal and 0 < len(config.sliding_layers) < config.num_layers):
        written["is_causal"] = bool(config.sliding_layers) and config.sliding_causal
    return written


def speculators_config(shape: DrafterShape, provenance: Provenance) -> dict[str, Any]:
    """config.json of the speculators form; its layer ids count from the embedding, so they are ours + 1."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": shape.block_size - 1,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "dtype": "bfloat16",
        "transformer_layer_config": draft_model_config(shape, provenance),
        "draft_vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "target_hidden_size": shape.hidden_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in provenance.target_layer_ids],
        "mask_token_id": provenance.mask_token_id,
        "sliding_window_non_causal": not shape.config.sliding_causal,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": provenance.target_name,
                "architectures": [provenance.target_architecture],
            },
        },
    }


def read_config(config: dict[str, Any], features_width: int) -> tuple[DrafterShape, tuple[int, ...], int]:
    """(shape, target layers counted from 0, MASK token) of either form; `features_width` is the input width of `fc`.

    Raises KeyError, TypeError or ConfigError on what is missing or misstated.
    """
    if "speculators_model_type" in config:
        body, block_size, mask_token_id = (
            config["transformer_layer_config"],
            config["block_size"],
            config["mask_token_id"],
        )
        layer_ids = tuple(layer - 1 for layer in config["aux_hidden_state_layer_ids"])
        causal = not config.get("sliding_window_non_causal", False)
    else:
        body, own = config, config["dflash_config"]
        block_size = own.get("block_size", config.get("block_size", 16))
        mask_token_id, layer_ids = own["mask_token_id"], tuple(own["target_layer_ids"])
        causal = config.get("is_causal", own.get("causal", True))
    kinds = body.get("layer_types") or ["full_attention"] * body["num_hidden_layers"]
    sliding = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    rope = body.get("rope_parameters") or {}
    drafter = DrafterConfig(
        num_layers=body["num_hidden_layers"],
        num_heads=body["num_attention_heads"],
        num_kv_heads=body["num_key_value_heads"],
        head_dim=body["head_dim"],
        intermediate_size=body["intermediate_size"],
        block_size=block_size,
        mask_token_id=mask_token_id,
        rms_norm_eps=body["rms_norm_eps"],
        sliding_window=body["sliding_window"] if sliding else None,
        sliding_layers=sliding,
        sliding_causal=bool(sliding) and bool(causal),
    )
    shape = DrafterShape(
        hidden_size=body["hidden_size"],
        vocab_size=body["vocab_size"],
        num_features=features_width // body["hidden_size"],
        rope_theta=float(rope.get("rope_theta", body.get("rope_theta"))),
        config=drafter,
    )
    return shape, layer_ids, mask_token_id
