"""The frozen target model: its hidden states at the chosen layers, its embedding and its head.

Shape legend: T context tokens, K captured layers, H hidden size, V vocabulary, L decoder layers.

A captured state is the OUTPUT of decoder layer `id` (0-based), residual included and before any final
norm: transformers' `hidden_states[id + 1]`. The forward runs on a trunk that ends after the last captured
layer; it shares the layers with the whole model and skips final norm, head and cache.

Documents of a packed row must not see each other. Run one by one they cannot. In one forward they do not
either where every mixer takes their bounds: attention here is our own (document_attention.py), and so is
GatedDeltaNet of the known make, around flash-linear-attention's recurrence (gated_delta.py). Any other needs
causal-conv1d as well, or runs document by document inside the row's forward. Whether a model keeps documents apart
is tried out when it is loaded, never assumed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from trainer.config import DrafterConfig
from trainer.data.batch import PackedBatch
from trainer.model.document_attention import document_bounds
from trainer.model.drafter import DrafterShape
from trainer.model.gated_delta import RowBounds, recurrent_row
from trainer.model.target_layers import TakenApart
from trainer.model.target_models import Captured, TargetError, is_hybrid, text_body
from trainer.model.tokenwise import Tokenwise


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
    """The layers that a packed row runs through instead: where they are compiled, or recurrent ones are our own."""

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

    @property
    def compiled(self) -> bool:
        """Whether packed rows of the announced length run compiled (`fix_row_length`, `warm_up`)."""
        return self.apart is not None and self.apart.compile

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
        hybrid = is_hybrid(self.model)
        own = hybrid and apart is not None and apart.own_recurrence
        recurrent = RowBounds.of(bounds, self._upload) if own else None
        if hybrid and not own and not (apart and apart.by_document):
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
        with document_bounds(bounds), recurrent_row(recurrent), self.tokenwise.row(rows):
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

        Where rows are not compiled this does nothing.
        """
        if self.compiled:
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
