"""The DFlash drafter: a small Qwen3-style network that denoises a block, reading the target through K and V.

Shape legend: T context tokens, N block slots, B block size, Q = N*B block positions, K captured target
layers, H hidden size, h query heads, k key/value heads, D head size, S = T + Q keys.

The attention itself is passed in (`Attend`), so that one network runs over FlexAttention, SDPA or the
dense oracle; so is the matrix product (`Product`), plain or in 8 bits. Nothing here depends on the data:
the whole forward compiles and captures as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.config import FP8_MULTIPLE, DrafterConfig
from trainer.model import fp8
from trainer.model.rotary import Ropes, Rotary, rotate
from trainer.model.swiglu import swiglu_down

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer_index, q_HQD [h,Q,D], k_HkD [k,S,D], v_HkD [k,S,D]) -> [h,Q,D]; keys are [context | blocks]."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""product(x [rows, in], weight [out, in]) -> [rows, out]: `nn.functional.linear`, or `trainer.model.fp8.linear`."""

Rows = Callable[[torch.Tensor], torch.Tensor]
"""Puts the rows of a matrix in another order, repeats some or leaves some out."""


class Shared(NamedTuple):
    """What all layers of one forward have in common."""

    context_TH: torch.Tensor
    ropes: Ropes
    attend: Attend
    product: Product
    recompute_attended: bool
    """Backward makes what attention reads anew from the projections, and rows anew from what it wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterShape:
    """Everything that fixes the drafter's parameters and arithmetic."""

    hidden_size: int
    """H, the target's own width: embedding and head are borrowed from it."""
    vocab_size: int
    num_features: int
    """K, how many target layers are fused."""
    rope_theta: float
    config: DrafterConfig

    @property
    def block_size(self) -> int:
        return self.config.block_size

    def window(self, layer_index: int) -> int | None:
        """The sliding window of one layer; None where the layer sees its whole document."""
        return self.config.sliding_window if layer_index in self.config.sliding_layers else None

    def causal(self, layer_index: int) -> bool:
        """Whether the layer is causal inside a block (only sliding layers ever are)."""
        return layer_index in self.config.sliding_layers and self.config.sliding_causal


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in fp32, the weight applied in the input's own type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def same_rows(x: torch.Tensor) -> torch.Tensor:
    """All of them, once."""
    return x


def called(function: Callable[..., Any], *arguments: Any, recompute: bool) -> Any:
    """`function(*arguments)`; if `recompute`, backward keeps nothing between the two and calls it again."""
    if not recompute:
        return function(*arguments)
    # Nothing is drawn at random here, and saving a generator's state would wait for the device.
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


class Attention(nn.Module):
    """Queries from the block; keys and values from [fused context ; block] through the same projections."""

    qkv_CH: torch.Tensor | None = None
    """The three projections as one matrix, where `Drafter.join` found them next to each other in memory."""

    def __init__(self, hidden_size: int, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], -1, self.head_dim)

    def _project(
        self, block_QH: torch.Tensor, context_TH: torch.Tensor, product: Product
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """(q, k, v) of the block and (k, v) of the context: two products where the weights are joined, else five."""
        to_q, to_k, to_v = self.q_proj.weight, self.k_proj.weight, self.v_proj.weight
        if self.qkv_CH is None:
            block = product(block_QH, to_q), product(block_QH, to_k), product(block_QH, to_v)
            return block, (product(context_TH, to_k), product(context_TH, to_v))
        sizes = [to_q.shape[0], to_k.shape[0], to_v.shape[0]]
        both = product(block_QH, self.qkv_CH), product(context_TH, self.qkv_CH[sizes[0] :])
        return torch.split(both[0], sizes, dim=1), torch.split(both[1], sizes[1:], dim=1)

    def forward(
        self, layer_index: int, rows_MH: torch.Tensor, shared: Shared, spread: Rows, kept: Rows
    ) -> torch.Tensor:
        """Rows [M, H] that `spread` makes the block's Q of -> those that `kept` leaves of them, [<= Q, H]."""
        block, context = self._project(rows_MH, shared.context_TH, shared.product)
        made = called(self._attended, block, context, shared.ropes, spread, recompute=shared.recompute_attended)
        mixed = shared.attend(layer_index, *made)
        merged = called(_merged, mixed, kept, recompute=shared.recompute_attended)
        return shared.product(merged, self.o_proj.weight)

    def _attended(
        self, block: tuple[torch.Tensor, ...], context: tuple[torch.Tensor, ...], ropes: Ropes, spread: Rows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `attend` takes, from the projections: elementwise but for the norms' means over a head."""
        (q, block_k, block_v), (context_k, context_v) = map(spread, block), context
        queries = rotate(self.q_norm(self._heads(q)), *ropes.block)
        context_keys = rotate(self.k_norm(self._heads(context_k)), *ropes.context)
        block_keys = rotate(self.k_norm(self._heads(block_k)), *ropes.block)
        keys, values = torch.cat((context_keys, block_keys)), self._heads(torch.cat((context_v, block_v)))
        # Head by head in memory: attention's output follows its queries' strides, and its rows are made once, after it.
        queries, keys, values = (x.transpose(0, 1).contiguous() for x in (queries, keys, values))
        return queries, keys, values


def _merged(mixed_hQD: torch.Tensor, kept: Rows) -> torch.Tensor:
    """Attention's output as rows [<= Q, h * D]."""
    return kept(mixed_hQD.transpose(0, 1).reshape(mixed_hQD.shape[1], -1))


class MLP(nn.Module):
    """SwiGLU."""

    gate_up_CH: torch.Tensor | None = None
    """Both input projections as one matrix, as in `Attention`."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        if self.gate_up_CH is None:
            gate, up = product(x, self.gate_proj.weight), product(x, self.up_proj.weight)
            return product(nn.functional.silu(gate) * up, self.down_proj.weight)
        return swiglu_down(product(x, self.gate_up_CH), self.down_proj.weight, in_8_bits=product is fp8.linear)


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP over the block; the context is read and never changed."""

    def __init__(self, hidden_size: int, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(hidden_size, config)
        self.post_attention_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.mlp = MLP(hidden_size, config.intermediate_size)

    def forward(
        self,
        layer_index: int,
        rows_MH: torch.Tensor,
        shared: Shared,
        *,
        recompute_mlp: bool,
        spread: Rows = same_rows,
        kept: Rows = same_rows,
    ) -> torch.Tensor:
        """As `Attention.forward`: one row may stand for all that are alike; what nobody reads need not go out."""
        normed = self.input_layernorm(rows_MH)
        block_QH = kept(spread(rows_MH)) + self.self_attn(layer_index, normed, shared, spread, kept)
        normed = self.post_attention_layernorm(block_QH)
        return block_QH + called(self.mlp, normed, shared.product, recompute=recompute_mlp)  # type: ignore[no-any-return]


class Drafter(nn.Module):
    """State-dict keys are the published ones; embedding and head belong to the target and are not held here."""

    def __init__(self, shape: DrafterShape, generator: torch.Generator | None = None) -> None:
        """Weights are drawn from `generator` (a CPU generator; seed 0 when None), the same on every device."""
        super().__init__()
        self.shape = shape
        device = torch.get_default_device()
        with torch.device("meta"):  # Linear draws weights on construction, which takes as long as drawing ours
            self._build(shape)
        self.to_empty(device=device)
        if device.type != "meta":
            self.reset_parameters(generator)

    @classmethod
    def empty(cls, shape: DrafterShape, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Drafter:
        """A drafter whose weights are about to be loaded: nothing is drawn. On `meta` they take no memory either."""
        with torch.device("meta"):
            made = cls(shape).to(dtype)
        return made.to_empty(device=device)

    def _build(self, shape: DrafterShape) -> None:
        config, hidden = shape.config, shape.hidden_size
        self.fc = nn.Linear(shape.num_features * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(hidden, config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.rotary = Rotary(config.head_dim, shape.rope_theta)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Normal weights of deviation 1/sqrt(inputs), residual outputs smaller by sqrt(2 * layers); norms at one.

        A fixed deviation of 0.02 suits a width of about 2500 and leaves a narrow drafter asleep for its first
        hundreds of steps.
        """
        generator = generator if generator is not None else torch.Generator().manual_seed(0)
        residual = 1.0 / math.sqrt(2 * self.shape.config.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = parameter.shape[1] ** -0.5
            std *= residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            # Drawn on the CPU in fp32, so that the same seed gives the same drafter on every device and type.
            drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
            parameter.copy_(drawn)

    def join(self, joined: Callable[[Sequence[str]], torch.Tensor | None]) -> None:
        """Let projections of the same input run as one product; names, values and `state_dict` stay as they are.

        `joined(names)` gives those parameters as one leaf over their own memory, or None where they do not lie next to
        each other: these stay apart. Afterwards parameters may change in place only, not be moved or cast.
        """
        for index, layer in enumerate(self.layers):
            attention, mlp = f"layers.{index}.self_attn", f"layers.{index}.mlp"
            assert isinstance(layer, DrafterLayer)
            layer.self_attn.qkv_CH = joined([f"{attention}.{x}_proj.weight" for x in "qkv"])
            layer.mlp.gate_up_CH = joined([f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"])

    def fuse(self, hidden_TKH: torch.Tensor, product: Product = nn.functional.linear) -> torch.Tensor:
        """Captured states [T, K*H] -> context features [T, H], once for all layers."""
        return self.hidden_norm(product(hidden_TKH, self.fc.weight))  # type: ignore[no-any-return]

    def ropes(self, positions_T: torch.Tensor, block_positions_Q: torch.Tensor) -> Ropes:
        """The rotary tables of a batch."""
        return Ropes(self.rotary(positions_T), self.rotary(block_positions_Q))

    def forward(
        self,
        hidden_TKH: torch.Tensor,
        positions_T: torch.Tensor,
        block_embeds_QH: torch.Tensor,
        block_positions_Q: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Final-normed block states [Q, H], ready for the target's head; any embeddings, nothing left out."""
        plain: Product = nn.functional.linear
        ropes = self.ropes(positions_T, block_positions_Q)
        shared = Shared(self.fuse(hidden_TKH, plain), ropes, attend, plain, recompute_attended=False)
        block_QH = block_embeds_QH
        for index, layer in enumerate(self.layers):
            block_QH = layer(index, block_QH, shared, recompute_mlp=False)
        return self.norm(block_QH)  # type: ignore[no-any-return]

    def drafted(
        self,
        hidden_TKH: torch.Tensor,
        ropes: Ropes,
        anchor_embeds_NH: torch.Tensor,
        mask_embed_H: torch.Tensor,
        attend: Attend,
        product: Product = nn.functional.linear,
        recompute_mlps: int = 0,
        recompute_attended: bool = False,
    ) -> torch.Tensor:
        """Training's form: final-normed states [N * (B - 1), H] of the drafted places of blocks [anchor, MASK, ...].

        The same as `forward` without the anchors' rows, with less work at both ends. What the first layer projects is
        one row for every anchor and one for MASK, however often it stands there. After the last layer's attention
        nobody reads an anchor's row any more.

        The first `recompute_mlps` layers keep nothing of their MLP for backward and run its products again there. The
        first, because they come last in backward: by then the other layers have let go of theirs.
        """
        slots, size = anchor_embeds_NH.shape[0], self.shape.block_size
        # 8-bit products sum over rows and take them in multiples of 16.
        masks = FP8_MULTIPLE - slots % FP8_MULTIPLE
        rows = torch.cat((anchor_embeds_NH, mask_embed_H.expand(masks, -1)))

        def spread(x: torch.Tensor) -> torch.Tensor:
            repeated = x[slots].expand(slots, size - 1, -1)
            return torch.cat((x[:slots, None], repeated), dim=1).flatten(0, 1)

        def drafted_places(x: torch.Tensor) -> torch.Tensor:
            return x.view(slots, size, -1)[:, 1:].reshape(slots * (size - 1), -1)

        early = slots * (size - 1) % FP8_MULTIPLE == 0
        last = len(self.layers) - 1
        shared = Shared(self.fuse(hidden_TKH, product), ropes, attend, product, recompute_attended)
        for index, layer in enumerate(self.layers):
            rows = layer(
                index,
                rows,
                shared,
                recompute_mlp=index < recompute_mlps,
                spread=spread if index == 0 else same_rows,
                kept=drafted_places if index == last and early else same_rows,
            )
        return self.norm(rows if early else drafted_places(rows))  # type: ignore[no-any-return]
