"""Loading the frozen target: its model, the layers to capture, its MASK row, and how it runs packed rows."""

from __future__ import annotations

import threading
from typing import Any

import torch

from trainer.config import TargetConfig
from trainer.model.gated_delta import in_turns
from trainer.model.target_fp8 import hold_in_8_bits
from trainer.model.target_models import (
    Captured,
    TargetError,
    capture_outputs,
    decoder_layers,
    make_body,
    random_model,
    stored_model,
)
from trainer.model.target_packing import choose_packing
from trainer.model.targets import Target
from trainer.model.tokenwise import Tokenwise

KNOWN_MASK_TOKENS = {"qwen3": 151669, "qwen3_5_text": 248070}
"""Rows of published vocabularies that never occur in text, by model type."""

_load_lock = threading.Lock()  # transformers sets the process-wide default dtype while it builds a model


def target_layer_ids(num_layers: int, num_features: int) -> tuple[int, ...]:
    """Layers to capture, by the published rule: evenly from layer 1 to layer L-3, one only: the middle.

    Raises TargetError where the rule cannot give distinct layers of this model.
    """
    if num_features == 1:
        return (num_layers // 2,)
    start, end = 1, num_layers - 3
    ids = tuple(round(start + i * (end - start) / (num_features - 1)) for i in range(num_features))
    if end < start or len(set(ids)) != num_features:
        raise TargetError(
            f"a target with {num_layers} layers has no {num_features} distinct layers between 1 and {end}; "
            "set target.num_features lower or target.layer_ids by hand"
        )
    return ids


def load_target(config: TargetConfig, device: torch.device | str) -> Target:
    """Load the target onto one device. Raises TargetError for everything foreseeable."""
    device = torch.device(device)
    import transformers  # slow to import, and only the roles that hold a target need it

    quiet: Any = transformers.utils.logging  # its functions carry no annotations
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    with _load_lock:
        if config.path.startswith("shape:"):
            model, tokenizer = random_model(config, device)
        else:
            model, tokenizer = stored_model(config, device)
    model.eval().requires_grad_(False)
    tokenwise = Tokenwise(device)
    layers = decoder_layers(model)
    if config.fp8:
        hold_in_8_bits(config, layers, device, tokenwise)
    model.to(device)
    if device.type == "cuda":  # elsewhere recurrences are plain torch
        for layer in layers:
            if "linear_attn" in layer._modules:
                in_turns(layer.get_submodule("linear_attn"))
    text_config = model.config.get_text_config()
    num_layers = int(text_config.num_hidden_layers)
    layer_ids = config.layer_ids or target_layer_ids(num_layers, config.num_features)
    if layer_ids[-1] >= num_layers:
        raise TargetError(
            f"target.layer_ids asks for layer {layer_ids[-1]}, but {config.path} has layers 0 to {num_layers - 1}"
        )
    if getattr(text_config, "final_logit_softcapping", None) is not None:
        raise TargetError(
            f"{config.path} soft-caps its logits, which neither the loss nor the exports know; choose another target"
        )
    embedding = model.get_input_embeddings()
    scale = getattr(embedding, "embed_scale", None)  # Gemma multiplies its embeddings
    embed_VH = embedding.weight if scale is None else embedding.weight * scale.to(embedding.weight.dtype)
    captured = Captured()
    capture_outputs(layers, layer_ids, captured)
    target = Target(
        name=config.path,
        model=model,
        tokenizer=tokenizer,
        layer_ids=layer_ids,
        rope_theta=_rope_theta(text_config),
        mask_token_id=_mask_token(tokenizer, text_config),
        num_layers=num_layers,
        embed_VH=embed_VH,
        head_VH=model.get_output_embeddings().weight,
        packing="documents",
        _trunk=make_body(model, layers[: layer_ids[-1] + 1], norm=False),
        _captured=captured,
        tokenwise=tokenwise,
        fp8=config.fp8,
    )
    target.packing = choose_packing(config, target)
    return target


def _rope_theta(text_config: Any) -> float:
    """The base of the target's rotary embedding; of its full-attention layers where there are two."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta") or getattr(text_config, "rope_theta", None)
    if theta is None:
        raise TargetError("the target's configuration names no rope_theta; set drafter.rope_theta")
    return float(theta)


def _mask_token(tokenizer: Any, text_config: Any) -> int | None:
    own = getattr(tokenizer, "mask_token_id", None)
    known = KNOWN_MASK_TOKENS.get(text_config.model_type)
    candidate = own if own is not None else known
    return candidate if candidate is not None and candidate < text_config.vocab_size else None
