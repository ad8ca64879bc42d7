"""Decoder layers of the frozen target, taken apart: the mixer's kernels, the rest as functions of a row's tokens.

A decoder layer is a norm, a mixer (attention or GatedDeltaNet), and a second half in which every token is by itself:
residual, norm, gated MLP, residual. Around the mixers transformers launches a dozen elementwise kernels a layer, in
fp32 where it norms. Here the norms and the second half are one function each, compiled once for a device and shared by
all layers of the same make. Mixers of a known make are taken apart as well (gated_delta.py, target_attention.py); any
other stays as it is, with its own kernels.

A compiled function has static shapes, so it runs where a row has the one length that was announced
(tokenwise.py). Every other length (documents alone, decoding, trials) runs the same functions uncompiled.

The layers here are shells around the model's own modules: the model itself is not changed, except that `gate_proj`
and `up_proj` become views of one matrix, as do `in_proj_b` and `in_proj_a`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.model.document_attention import current_bounds
from trainer.model.gated_delta import GatedDelta, joined, unknown_recurrence
from trainer.model.target_attention import Attention, known_attention
from trainer.model.tokenwise import Tokenwise

KNOWN = (
    "Gemma3DecoderLayer",
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3_5DecoderLayer",
    "SmolLM3DecoderLayer",
)
"""transformers' classes whose forward the shells are. Others have the same parts and do more with them: Granite scales
its sums, Ministral its queries."""
MIXERS = ("self_attn", "linear_attn")
NORMS = ("input_layernorm", "post_attention_layernorm")
SANDWICH_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Gemma norms what goes into the MLP and what comes out of it, and the mixer's output instead of the sum."""
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def norm_tokens(norm: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    """One norm, whichever kind the model has."""
    return norm(*args)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


def second_half(half: SecondHalf, residual: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """Residual sums, norms and the MLP: [1, T, H] from the layer's input and its mixer's output."""
    if half.pre_feedforward_layernorm is None:
        entered = residual + mixed
        return entered + half.mlp(half.post_attention_layernorm(entered))  # type: ignore[no-any-return]  # as above
    entered = residual + half.post_attention_layernorm(mixed)
    out = half.mlp(half.pre_feedforward_layernorm(entered))
    return entered + half.post_feedforward_layernorm(out)  # type: ignore[no-any-return]  # as above


class GatedMLP(nn.Module):
    """down(act(gate x) * up x) with gate and up in one product."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.gate_up, self.down, self.act = gate_up, down, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)  # type: ignore[no-any-return]  # as above


class SecondHalf(nn.Module):
    """The modules of `second_half`, nothing else: the compiled function guards on what it is given."""

    pre_feedforward_layernorm: Any  # transformers' modules are untyped here
    post_feedforward_layernorm: Any
    post_attention_layernorm: Any
    mlp: Any

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        parts = layer._modules
        self.post_attention_layernorm = parts["post_attention_layernorm"]
        self.pre_feedforward_layernorm = parts.get("pre_feedforward_layernorm")
        self.post_feedforward_layernorm = parts.get("post_feedforward_layernorm")
        mlp: Any = layer.mlp
        self.mlp = GatedMLP(joined(mlp.gate_proj, mlp.up_proj), mlp.down_proj, mlp.act_fn)


class TokenwiseNorm(nn.Module):
    """A norm inside a mixer, compiled where its row is."""

    def __init__(self, norm: nn.Module, tokenwise: Tokenwise) -> None:
        super().__init__()
        self.norm, self._tokenwise = norm, tokenwise

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self._tokenwise(norm_tokens, self.norm, *args)  # type: ignore[no-any-return]  # as above


class DocumentByDocument(nn.Module):
    """A recurrent mixer whose kernels cannot keep packed documents apart: one call for each document."""

    def __init__(self, mixer: nn.Module, tokenwise: Tokenwise) -> None:
        super().__init__()
        self.mixer, self._tokenwise = mixer, tokenwise

    def forward(self, hidden_states: torch.Tensor, **rest: Any) -> torch.Tensor:
        bounds = current_bounds() or [0, hidden_states.shape[1]]
        parts = []
        for a, b in itertools.pairwise(bounds):
            with self._tokenwise.row(b - a):
                parts.append(self.mixer(hidden_states=hidden_states[:, a:b], **rest))
        return torch.cat(parts, dim=1)


class TrunkLayer(nn.Module):
    """One decoder layer, taken apart. Takes what transformers hands a layer; uses no cache and no mask."""

    def __init__(self, layer: nn.Module, tokenwise: Tokenwise, *, own_recurrence: bool) -> None:
        super().__init__()
        self.recurrent = hasattr(layer, "linear_attn")
        self.input_layernorm = layer.input_layernorm
        self.second = SecondHalf(layer)
        self._original = [getattr(layer, "linear_attn" if self.recurrent else "self_attn")]  # a list: not a child
        self.mixer = self._taken_apart(tokenwise, own_recurrence)
        self._tokenwise = tokenwise

    def _taken_apart(self, tokenwise: Tokenwise, own_recurrence: bool) -> nn.Module:
        mixer = self._original[0]
        if self.recurrent and own_recurrence:
            return GatedDelta(mixer, tokenwise)
        if not self.recurrent and known_attention(mixer):
            return Attention(mixer, tokenwise)
        return with_tokenwise_norms(mixer, tokenwise)

    def run_by_document(self) -> None:
        """Run a recurrent mixer document by document, each at its own length."""
        if self.recurrent:
            self.mixer = DocumentByDocument(self._original[0], self._tokenwise)

    def forward(self, hidden_states: torch.Tensor, *, position_embeddings: Any = None, **rest: Any) -> torch.Tensor:
        entered = self._tokenwise(norm_tokens, self.input_layernorm, hidden_states)
        packing = {name: value for name, value in rest.items() if name in PACKING}
        if self.recurrent:
            mixed = self.mixer(hidden_states=entered, attention_mask=None, **packing)
        else:
            mixed, _ = self.mixer(
                hidden_states=entered, attention_mask=None, position_embeddings=position_embeddings, **packing
            )
        return self._tokenwise(second_half, self.second, hidden_states, mixed)  # type: ignore[no-any-return]  # as above


@dataclass
class TakenApart:
    """The body in layers of target_layers.py, sharing every weight with the model."""

    layers: list[TrunkLayer]
    trunk: nn.Module
    """Up to the last captured layer."""
    body: nn.Module
    """All layers and the final norm."""
    compile: bool
    own_recurrence: bool
    """Recurrent mixers are `GatedDelta` shells, or there are none."""
    by_document: bool = False
    """Recurrent mixers run document by document."""

    def run_by_document(self) -> None:
        """Keep documents apart where the kernels of a recurrent mixer do not."""
        self.by_document, self.own_recurrence = True, False
        for layer in self.layers:
            layer.run_by_document()


PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""How transformers passes a packed row's bounds on."""


def unknown_layer(layer: nn.Module) -> str | None:
    """Why this decoder layer cannot be taken apart; None where it can."""
    children = set(layer._modules)
    sandwich = children & set(SANDWICH_NORMS)
    expected = {*NORMS, *(SANDWICH_NORMS if sandwich else ()), "mlp"}
    mixers = children & set(MIXERS)
    if len(mixers) != 1 or children - mixers != expected:
        return f"{type(layer).__name__} has the parts {', '.join(sorted(children))}"
    mlp = layer._modules["mlp"]
    if mlp is None or set(mlp._modules) != MLP_PARTS:
        return f"its MLP is a {type(mlp).__name__}"
    if type(layer).__name__ not in KNOWN:
        return f"{type(layer).__name__} is none of {', '.join(KNOWN)}"
    return None


def rows_keep_documents_apart(layers: Sequence[nn.Module]) -> bool:
    """Whether shells of these layers do, with no more than flash-linear-attention: the recurrent ones are all known."""
    recurrent = [layer._modules["linear_attn"] for layer in layers if "linear_attn" in layer._modules]
    return not any(map(unknown_layer, layers)) and not any(map(unknown_recurrence, recurrent))


def with_tokenwise_norms(mixer: nn.Module, tokenwise: Tokenwise) -> nn.Module:
    """A shell of the mixer that shares everything with it except that its norms are compiled with the row.

    Only transformers' own norms: flash-linear-attention brings one that is a kernel already.
    """
    shell = copy.copy(mixer)
    shell._modules = {
        name: TokenwiseNorm(part, tokenwise)
        if part is not None and "norm" in name and type(part).__module__.startswith("transformers.")
        else part
        for name, part in mixer._modules.items()
    }
    return shell
