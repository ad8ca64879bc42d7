"""Building the target's transformers model: from a directory, from random weights, and cut to its trunk."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config import HUB_NAME, TargetConfig
from trainer.model.document_attention import register
from trainer.model.kernels import slow_kernel_reason
from trainer.model.target_fp8 import eight_bit_parameters
from trainer.model.target_layers import rows_keep_documents_apart

TINY = Path(__file__).resolve().parent.parent / "assets" / "tiny"

SHAPES: dict[str, dict[str, Any]] = {
    # Qwen3.5-27B's text body, from its public configuration.
    "27b": {
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "max_position_embeddings": 262144,
    },
    # Qwen3-8B, from its public configuration: dense, every layer attends.
    "8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    # A hybrid like the first that fits beside other work: for trials of the pipeline at speed.
    "1b": {
        "vocab_size": 32768,
        "hidden_size": 1536,
        "intermediate_size": 4608,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "max_position_embeddings": 32768,
    },
}
SHAPE_ROPE_THETA = 1e7
DENSE_ROPE_THETA = 1e6


class TargetError(ValueError):
    """A target that cannot be used; the message says what, why and what to do."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Sizes of a target, known before anything is loaded."""

    parameters: int
    hidden_size: int
    vocab_size: int
    features: int
    """K, the captured layers."""
    eight_bit_parameters: int = 0
    """Of `parameters`, those that take one byte each, with target.fp8."""


class Captured(threading.local):
    """Where this thread's layer hooks put their outputs; nowhere when nobody asked."""

    states: dict[int, torch.Tensor] | None = None
    """The outputs themselves, by layer."""
    out: torch.Tensor | None = None
    """[T, >= K*H]: the k-th captured layer's output is copied into columns k*H to (k+1)*H."""


def stored_model(config: TargetConfig, device: torch.device) -> tuple[Any, Any]:
    """Model, still on the CPU, and tokenizer of a directory; `device` is where it will run. Raises TargetError."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = _checkpoint(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, config.dtype), local_files_only=True, attn_implementation=register()
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise TargetError(f"target.path {config.path!r} does not load: {error}") from error
    known = rows_keep_documents_apart(decoder_layers(model))
    _refuse_slow_kernels(config, model.config.get_text_config(), device, known=known)
    return model, tokenizer


def _checkpoint(config: TargetConfig) -> Path:
    path = TINY if config.path == "tiny" else Path(config.path).expanduser()
    if not (path / "config.json").is_file():
        raise TargetError(
            f"target.path {config.path!r} has no config.json: expected `tiny`, `shape:27b`, or a directory with a "
            f"transformers checkpoint{_hub_hint(config.path)}"
        )
    return path


def _hub_hint(path: str) -> str:
    if not HUB_NAME.fullmatch(path):
        return ""
    return (
        ". That looks like a model on the Hugging Face hub, and a run loads local files only: "
        f"`hf download {path} --local-dir DIR`, then set target.path=DIR"
    )


def random_model(config: TargetConfig, device: torch.device) -> tuple[Any, Any]:
    """A published shape with random weights, and the tiny tokenizer. Raises TargetError."""
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

    name = config.path.removeprefix("shape:")
    if name not in SHAPES:
        raise TargetError(f"target.path {config.path!r}: known shapes are {', '.join(f'shape:{s}' for s in SHAPES)}")
    rope = {
        "rope_type": "default",
        "rope_theta": SHAPE_ROPE_THETA,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
    shape: Any
    build: Any  # unannotated in transformers
    if "linear_num_key_heads" in SHAPES[name]:
        shape = Qwen3_5TextConfig(**SHAPES[name], rope_parameters=rope, tie_word_embeddings=False)
        build = Qwen3_5ForCausalLM._from_config
    else:
        plain = {"rope_type": "default", "rope_theta": DENSE_ROPE_THETA}
        shape = Qwen3Config(**SHAPES[name], rope_parameters=plain, tie_word_embeddings=False)
        build = Qwen3ForCausalLM._from_config
    _refuse_slow_kernels(config, shape, device, known=True)  # before a weight is made; a test looks at the layers
    # Built on the device itself: 27B parameters never pass through host memory.
    with torch.device(device):
        model: Any = build(shape, dtype=getattr(torch, config.dtype), attn_implementation=register())
    return model, AutoTokenizer.from_pretrained(TINY, local_files_only=True)


def weigh(config: TargetConfig) -> TargetFacts:
    """What the target will hold, from its configuration alone: nothing is loaded. Raises TargetError."""
    meta = torch.device("meta")
    if config.path.startswith("shape:"):
        model, _ = random_model(config, meta)
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            stored = AutoConfig.from_pretrained(_checkpoint(config), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise TargetError(f"target.path {config.path!r} does not load: {error}") from error
        build: Any = AutoModelForCausalLM.from_config  # unannotated in transformers
        with meta:
            model = build(stored)
    shape = model.config.get_text_config()
    layers = decoder_layers(model)
    return TargetFacts(
        parameters=sum(p.numel() for p in model.parameters()),
        hidden_size=int(shape.hidden_size),
        vocab_size=int(shape.vocab_size),
        features=len(config.layer_ids) if config.layer_ids else config.num_features,
        eight_bit_parameters=eight_bit_parameters(layers) if config.fp8 else 0,
    )


def _refuse_slow_kernels(config: TargetConfig, text_config: Any, device: torch.device, *, known: bool) -> None:
    """`known`: rows run in gated_delta.py, unless documents are asked for, which run transformers' own forward."""
    if config.allow_slow_kernels:
        return
    layer_types = getattr(text_config, "layer_types", None) or ()
    reason = slow_kernel_reason(layer_types, device, own_convolution=known and config.packing != "documents")
    if reason is not None:
        raise TargetError(f"target.path {config.path!r}: {reason}")


def text_body(model: Any) -> Any:
    """The decoder without its head; the language part of a model that has others."""
    body = model.base_model
    return getattr(body, "language_model", body)


def is_hybrid(model: Any) -> bool:
    """Whether some layers carry a recurrent state (GatedDeltaNet) instead of attending."""
    return "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ())


def decoder_layers(model: Any) -> list[nn.Module]:
    """The text body's decoder layers in order. Raises TargetError."""
    layers = getattr(text_body(model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise TargetError(f"{type(model).__name__} has no list of decoder layers where this trainer looks for one")
    return list(layers)


def capture_outputs(layers: Sequence[nn.Module], layer_ids: tuple[int, ...], captured: Captured) -> None:
    """Hook the chosen layers."""

    def hook_for(layer_id: int, place: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            state = output[0] if isinstance(output, tuple) else output
            if captured.states is not None:
                captured.states[layer_id] = state
            if captured.out is not None:
                width = state.shape[-1]
                captured.out[:, place * width : (place + 1) * width] = state[0]

        return keep

    for place, layer_id in enumerate(layer_ids):
        layers[layer_id].register_forward_hook(hook_for(layer_id, place))


def make_body(model: Any, layers: Sequence[nn.Module], *, norm: bool) -> nn.Module:
    """The text body with these layers in place of its own, sharing everything else; `norm`: with the final norm."""
    body = text_body(model)
    shell = copy.copy(body)
    shell._modules = dict(body._modules)
    shell.config = copy.deepcopy(body.config)
    shell.config.num_hidden_layers = len(layers)
    shell.layers = nn.ModuleList(layers)
    if not norm:
        shell.norm = nn.Identity()
    return shell  # type: ignore[no-any-return]
