"""The frozen target model: its hidden states at the chosen layers, its embedding and its head.

Shape legend: T context tokens, K captured layers, H hidden size, V vocabulary, L decoder layers.

A captured state is the OUTPUT of decoder layer `id` (0-based), residual included and before any final
norm: transformers' `hidden_states[id + 1]`. The forward runs on a trunk that ends after the last captured
layer; it shares the layers with the whole model and skips final norm, head and cache.

Documents of a packed row must not see each other. Run one by one they cannot. In one forward they do not
either where every mixer takes their bounds: attention here is our own (document_attention.py), GatedDeltaNet
needs both flash-linear-attention and causal-conv1d, or runs document by document inside the row's forward. Whether
a model keeps documents apart is tried out when it is loaded, never assumed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from trainer.config import DrafterConfig, TargetConfig
from trainer.data.batch import PackedBatch
from trainer.model.document_attention import document_bounds
from trainer.model.drafter import DrafterShape
from trainer.model.target_fp8 import hold_in_8_bits
from trainer.model.target_layers import TakenApart
from trainer.model.target_models import (
    Captured,
    TargetError,
    capture_outputs,
    decoder_layers,
    make_body,
    random_model,
    stored_model,
    text_body,
)
from trainer.model.target_packing import choose_packing, is_hybrid
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


@dataclass(frozen=True, slots=True)
class WithFinalStates:
    """A target that gives its final states with the captured ones: the pipeline's target where labels need them."""

    target: Target

    def hidden_states(self, packed: PackedBatch) -> torch.Tensor:
        """[T, (K+1)*H]."""
        return self.target.hidden_states(packed, final=True)

    def warm_up(self) -> None:
        """As the target's own: the same functions run in the layers that are left."""
        self.target.warm_up()


@dataclass
class Target:
    """A loaded target. Frozen, in evaluation mode; safe to call from several threads of one device."""

    name: str
    model: Any
    """The whole causal language model of transformers, an untyped nn.Module (for true decoding)."""
    tokenizer: Any
    layer_ids: tuple[int, ...]
    rope_theta: float
    mask_token_id: int | None
    """The reserved row known for this vocabulary; None: `drafter.mask_token_id` must say."""
    num_layers: int
    embed_VH: torch.Tensor
    head_VH: torch.Tensor
    packing: Literal["row", "documents"]
    """How a packed row runs: in one forward, or document by document."""
    _trunk: nn.Module = field(repr=False)
    """The body up to the last captured layer, of the model's own layers."""
    _captured: Captured = field(repr=False)
    tokenwise: Tokenwise = field(repr=False)
    fp8: bool = False
    """Whether its linear layers are held in 8 bits."""
    apart: TakenApart | None = field(default=None, repr=False)
    """The layers that a packed row runs through instead, where norms and MLPs are compiled."""

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
    def document_states(
        self, input_ids_T: torch.Tensor, out: torch.Tensor | None = None, *, final: bool = False
    ) -> torch.Tensor:
        """Captured states [T, K*H] of one document, on the target's device; `out` and `final` as in `hidden_states`."""
        body = text_body(self.model) if final else self._trunk
        out = self._room(input_ids_T.shape[0], final) if out is None else out
        with self.tokenwise.row(input_ids_T.shape[0]):
            self._run(body, out, final, input_ids=self._upload(input_ids_T)[None], use_cache=False)
        return out

    @torch.no_grad()
    def row_states(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        bounds: list[int],
        out: torch.Tensor | None = None,
        *,
        final: bool = False,
    ) -> torch.Tensor:
        """Captured states [T, K*H] of documents [bounds[i], bounds[i+1]) in one forward, which must cover all T."""
        apart = self.apart
        kwargs: dict[str, Any] = {}
        if is_hybrid(self.model) and not (apart and apart.by_document):
            lengths = torch.tensor([b - a for a, b in itertools.pairwise(bounds)])
            cu_seqlens = self._upload(torch.tensor(bounds, dtype=torch.int32))
            seq_idx = torch.repeat_interleave(torch.arange(lengths.numel(), dtype=torch.int32), lengths)
            kwargs = {
                "cu_seq_lens_q": cu_seqlens,
                "cu_seq_lens_k": cu_seqlens,
                "max_length_q": int(lengths.max()),
                "max_length_k": int(lengths.max()),
                "seq_idx": self._upload(seq_idx)[None],
            }
        rows = input_ids_T.shape[0]
        out = self._room(rows, final) if out is None else out
        body = text_body(self.model) if final else self._trunk
        if apart is not None:
            body = apart.body if final else apart.trunk
        with document_bounds(bounds), self.tokenwise.row(rows):
            self._run(
                body,
                out,
                final,
                input_ids=self._upload(input_ids_T)[None],
                position_ids=self._upload(positions_T)[None],
                use_cache=False,
                **kwargs,
            )
        return out

    @contextmanager
    def capturing(self) -> Iterator[dict[int, torch.Tensor]]:
        """Collect this thread's outputs [1, n, H] of the chosen layers, by layer, of forwards inside the block."""
        states: dict[int, torch.Tensor] = {}
        self._captured.states = states
        try:
            yield states
        finally:
            self._captured.states = None

    def _run(self, body: Any, out_TKH: torch.Tensor, final: bool, **inputs: Any) -> None:
        self._captured.out = out_TKH
        try:
            found = body(**inputs)
        finally:
            self._captured.out = None
        if final:
            out_TKH[:, self.num_features * self.hidden_size :] = found.last_hidden_state[0]

    def _room(self, rows: int, final: bool) -> torch.Tensor:
        size = (rows, (self.num_features + final) * self.hidden_size)
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def _upload(self, x: torch.Tensor) -> torch.Tensor:
        # From pageable memory the copy would wait until the device has finished everything before it.
        if x.device.type == "cpu" and self.device.type == "cuda":
            return x.pin_memory().to(self.device, non_blocking=True)
        return x.to(self.device)

    @torch.no_grad()
    def hidden_states(
        self, packed: PackedBatch, out: torch.Tensor | None = None, *, final: bool = False
    ) -> torch.Tensor:
        """Captured states [T, K*H] of a packed row, each document as if alone; padding is zero.

        With `final` the whole model runs and its final-normed states follow, [T, (K+1)*H]: labels that the target
        itself makes need them (`loss.labels` argmax and kl), nothing else does.
        `out` is written and returned when given (a persistent buffer on the target's device). On a CPU, raises
        TargetError when a state is not finite; on a GPU that check would wait for the device, and a step whose
        gradient is not finite is skipped instead.
        """
        rows = packed.input_ids_T.shape[0]
        out = self._room(rows, final) if out is None else out
        bounds = packed.cu_seqlens_D1[: packed.documents + 1].tolist()
        end = bounds[-1]
        if self.packing == "row" and end > 0:
            # Compiled functions have one shape: padding then runs along, as a document of its own.
            padded = self.tokenwise.tokens == rows
            run = rows if padded else end
            if run > end:
                bounds.append(run)
            self.row_states(packed.input_ids_T[:run], packed.positions_T[:run], bounds, out[:run], final=final)
        else:
            for a, b in itertools.pairwise(bounds):
                self.document_states(packed.input_ids_T[a:b], out[a:b], final=final)
        out[end:] = 0
        if self.device.type == "cpu" and not bool(out.isfinite().all()):
            raise TargetError(
                f"{self.name} gave hidden states that are not finite in batch {packed.index}; its weights are damaged "
                f"or {str(self.dtype).removeprefix('torch.')} is too narrow for it (set target.dtype)"
            )
        return out

    def fix_row_length(self, tokens: int) -> None:
        """From now on rows of this many tokens run compiled; the first one compiles, which is the gate's business.

        Without `target.compile` this does nothing.
        """
        if self.apart is not None and self.apart.compile:
            self.tokenwise.tokens = tokens

    def warm_up(self) -> None:
        """Compile on this thread and device, with rows of two different packings."""
        tokens = self.tokenwise.tokens
        if tokens is None:
            return
        generator = torch.Generator().manual_seed(0)
        for bounds in ([0, tokens], [0, tokens // 3, tokens]):
            ids_T = torch.randint(0, self.vocab_size, (tokens,), generator=generator)
            positions_T = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)])
            self.row_states(ids_T, positions_T, bounds)

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
            model, tokenizer = random_model(config, device)
        else:
            model, tokenizer = stored_model(config, device)
    model.eval().requires_grad_(False)
    tokenwise = Tokenwise(device)
    layers = decoder_layers(model)
    if config.fp8:
        hold_in_8_bits(config, layers, device, tokenwise)
    model.to(device)
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
