"""The frozen target model: its hidden states at the chosen layers, its embedding and its head.

Shape legend: T context tokens, K captured layers, H hidden size, V vocabulary, L decoder layers.

A captured state is the OUTPUT of decoder layer `id` (0-based), residual included and before any final
norm: transformers' `hidden_states[id + 1]`. The forward runs on a trunk that ends after the last captured
layer; it shares the layers with the whole model and skips final norm, head and cache.

Documents of a packed row must not see each other. Run one by one they cannot, so that is what happens
wherever a kernel would carry state across (every CPU run: the reference GatedDeltaNet ignores bounds).
"""

from __future__ import annotations

import copy
import itertools
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config import DrafterConfig, TargetConfig
from trainer.data.batch import PackedBatch
from trainer.model.drafter import DrafterShape
from trainer.model.kernels import slow_kernel_reason

TINY = Path(__file__).resolve().parent.parent / "assets" / "tiny"

KNOWN_MASK_TOKENS = {"qwen3": 151669, "qwen3_5_text": 248070}
"""Rows of published vocabularies that never occur in text, by model type."""

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
    # A body of the same kind that fits beside other work: for trials of the pipeline at speed.
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

_load_lock = threading.Lock()  # transformers sets the process-wide default dtype while it builds a model


class TargetError(ValueError):
    """A target that cannot be used; the message says what, why and what to do."""


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


class _Captured(threading.local):
    """Where the layer hooks put their outputs: one list for each thread, None when nobody asked."""

    states: dict[int, torch.Tensor] | None = None


@dataclass
class Target:
    """A loaded target. Frozen, in evaluation mode; safe to call from several threads of one device."""

    name: str
    model: nn.Module
    """The whole causal language model (for true decoding)."""
    tokenizer: Any
    layer_ids: tuple[int, ...]
    rope_theta: float
    mask_token_id: int | None
    """The reserved row known for this vocabulary; None: `drafter.mask_token_id` must say."""
    num_layers: int
    embed_VH: torch.Tensor
    head_VH: torch.Tensor
    _trunk: nn.Module = field(repr=False)
    _captured: _Captured = field(repr=False)

    @property
    def hidden_size(self) -> int:
        return int(self.embed_VH.shape[1])

    @property
    def vocab_size(self) -> int:
        return int(self.embed_VH.shape[0])

    @property
    def num_features(self) -> int:
        return len(self.layer_ids)

    @property
    def device(self) -> torch.device:
        return self.embed_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_VH.dtype

    @torch.no_grad()
    def document_states(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """Captured states [T, K*H] of one document, on the target's device."""
        states: dict[int, torch.Tensor] = {}
        self._captured.states = states
        try:
            self._trunk(input_ids=input_ids_T.to(self.device)[None], use_cache=False)
        finally:
            self._captured.states = None
        return torch.cat([states[i][0] for i in self.layer_ids], dim=-1)

    @torch.no_grad()
    def hidden_states(self, packed: PackedBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """Captured states [T, K*H] of a packed row, each document as if alone; padding is zero.

        `out` is written and returned when given (a persistent buffer on the target's device).
        """
        rows = packed.input_ids_T.shape[0]
        if out is None:
            size = (rows, self.num_features * self.hidden_size)
            out = torch.empty(size, dtype=self.dtype, device=self.device)
        bounds = packed.cu_seqlens_D1[: packed.documents + 1].tolist()
        for start, end in itertools.pairwise(bounds):
            out[start:end] = self.document_states(packed.input_ids_T[start:end])
        out[bounds[-1] :] = 0
        return out

    def mask_token(self, config: DrafterConfig) -> int:
        """The MASK row to use: the configuration's, else the vocabulary's own. Raises TargetError."""
        token = config.mask_token_id if config.mask_token_id is not None else self.mask_token_id
        if token is None:
            raise TargetError(
                f"no MASK token is known for {self.name}: set drafter.mask_token_id to a vocabulary row that "
                "never occurs in text (never the end or padding token)"
            )
        if not 0 <= token < self.vocab_size:
            raise TargetError(
                f"MASK token {token} lies outside the vocabulary of {self.name} ({self.vocab_size} rows); "
                "set drafter.mask_token_id"
            )
        reserved = {getattr(self.tokenizer, "eos_token_id", None), getattr(self.tokenizer, "pad_token_id", None)}
        if token in reserved:
            raise TargetError(
                f"MASK token {token} is the end or padding token of {self.name}, which occurs in text; "
                "set drafter.mask_token_id to a row that never does"
            )
        return token

    def drafter_shape(self, config: DrafterConfig) -> DrafterShape:
        """The drafter that fits this target."""
        return DrafterShape(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            num_features=self.num_features,
            rope_theta=config.rope_theta if config.rope_theta is not None else self.rope_theta,
            config=config,
        )


def load_target(config: TargetConfig, device: torch.device | str) -> Target:
    """Load the target onto one device. Raises TargetError for everything foreseeable."""
    device = torch.device(device)
    import transformers  # slow to import, and only the roles that hold a target need it

    quiet: Any = transformers.utils.logging  # its functions carry no annotations
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    with _load_lock:
        if config.path.startswith("shape:"):
            model, tokenizer = _random_model(config, device)
        else:
            model, tokenizer = _stored_model(config, device)
    model.eval().requires_grad_(False)
    text_config = model.config.get_text_config()
    num_layers = int(text_config.num_hidden_layers)
    layer_ids = config.layer_ids or target_layer_ids(num_layers, config.num_features)
    if layer_ids[-1] >= num_layers:
        raise TargetError(
            f"target.layer_ids asks for layer {layer_ids[-1]}, but {config.path} has layers 0 to {num_layers - 1}"
        )
    embedding = model.get_input_embeddings()
    scale = getattr(embedding, "embed_scale", None)  # Gemma multiplies its embeddings
    embed_VH = embedding.weight if scale is None else embedding.weight * scale.to(embedding.weight.dtype)
    captured = _Captured()
    return Target(
        name=config.path,
        model=model,
        tokenizer=tokenizer,
        layer_ids=layer_ids,
        rope_theta=_rope_theta(text_config),
        mask_token_id=_mask_token(tokenizer, text_config),
        num_layers=num_layers,
        embed_VH=embed_VH,
        head_VH=model.get_output_embeddings().weight,
        _trunk=_make_trunk(model, layer_ids, captured),
        _captured=captured,
    )


def _stored_model(config: TargetConfig, device: torch.device) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = TINY if config.path == "tiny" else Path(config.path).expanduser()
    if not (path / "config.json").is_file():
        raise TargetError(
            f"target.path {config.path!r} has no config.json: expected `tiny`, `shape:27b`, or a directory with a "
            "transformers checkpoint"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, config.dtype), local_files_only=True, low_cpu_mem_usage=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise TargetError(f"target.path {config.path!r} does not load: {error}") from error
    _refuse_slow_kernels(config, model.config.get_text_config(), device)
    return model.to(device), tokenizer


def _random_model(config: TargetConfig, device: torch.device) -> tuple[Any, Any]:
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

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
    shape = Qwen3_5TextConfig(**SHAPES[name], rope_parameters=rope, tie_word_embeddings=False)
    _refuse_slow_kernels(config, shape, device)
    build: Any = Qwen3_5ForCausalLM._from_config  # unannotated in transformers
    # Built on the device itself: 27B parameters never pass through host memory.
    with torch.device(device):
        model: Any = build(shape, dtype=getattr(torch, config.dtype))
    return model, AutoTokenizer.from_pretrained(TINY, local_files_only=True)


def _refuse_slow_kernels(config: TargetConfig, text_config: Any, device: torch.device) -> None:
    if config.allow_slow_kernels:
        return
    reason = slow_kernel_reason(getattr(text_config, "layer_types", None) or (), device)
    if reason is not None:
        raise TargetError(f"target.path {config.path!r}: {reason}")


def _make_trunk(model: Any, layer_ids: tuple[int, ...], captured: _Captured) -> nn.Module:
    """The text body up to the last captured layer, sharing its modules with `model`, with capture hooks."""
    body = model.base_model
    body = getattr(body, "language_model", body)
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise TargetError(f"{type(model).__name__} has no list of decoder layers where this trainer looks for one")

    def hook_for(layer_id: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if captured.states is not None:
                captured.states[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep

    for layer_id in layer_ids:
        layers[layer_id].register_forward_hook(hook_for(layer_id))
    trunk = copy.copy(body)
    trunk._modules = dict(body._modules)
    trunk.config = copy.deepcopy(body.config)
    trunk.config.num_hidden_layers = layer_ids[-1] + 1
    trunk.layers = nn.ModuleList(layers[: layer_ids[-1] + 1])
    trunk.norm = nn.Identity()
    return trunk  # type: ignore[no-any-return]


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
