"""The drafter's attention, two ways: compiled FlexAttention, and scaled-dot-product attention in chunks of blocks.

Both compute the same function of (q, k, v) and the batch's anchors. The drafter calls `attend(layer, q, k, v)` and
knows neither. A query that sees no key (an unused block slot) gives zeros and passes no gradient.

Shape legend: T context tokens, N block slots, B block size, Q = N * B, h query heads, g key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.config import DrafterConfig
from trainer.model.block_tables import BlockTables, ContextSpans, MaskLayout, build_block_mask
from trainer.model.mask import dense_mask, open_empty_rows
from trainer.model.window import GATHER_LIMIT, Windows, make_windows, window_attention


class DenseFallbackError(RuntimeError):
    """FlexAttention was about to compute every score because its call is not compiled."""


class Attention(Protocol):
    """What a drafter layer calls, and what the step refills for each batch."""

    def __call__(self, layer: int, q_hQD: torch.Tensor, k_gSD: torch.Tensor, v_gSD: torch.Tensor) -> torch.Tensor:
        """[h, Q, D], [g, T + Q, D] twice -> [h, Q, D]; keys are [context | blocks]."""

    def fill(
        self, anchors_N: torch.Tensor, keep_N: torch.Tensor, doc_ids_T: torch.Tensor, cu_seqlens_D1: torch.Tensor
    ) -> None:
        """Describe a new batch in the storage that is already there; no host synchronisation."""


def layer_layouts(config: DrafterConfig, context: int, slots: int) -> tuple[MaskLayout, ...]:
    """The mask of each drafter layer: sliding layers have a window, the others see their document's whole context."""
    return tuple(
        MaskLayout(
            context=context,
            slots=slots,
            block_size=config.block_size,
            window=config.sliding_window if layer in config.sliding_layers else None,
            causal=config.sliding_causal and layer in config.sliding_layers,
        )
        for layer in range(config.num_layers)
    )


class FlexAttention:
    """FlexAttention over block tables that are rebuilt in place; runs compiled or raises."""

    def __init__(self, layouts: Sequence[MaskLayout], device: torch.device) -> None:
        first = layouts[0]
        self.spans = ContextSpans.empty(first.slots, device)
        distinct = list(dict.fromkeys(layouts))
        self._tables = [(layout, BlockTables.empty(layout, device)) for layout in distinct]
        masks = [build_block_mask(layout, self.spans, tables) for layout, tables in self._tables]
        self.masks: tuple[BlockMask, ...] = tuple(masks[distinct.index(layout)] for layout in layouts)

    def fill(
        self, anchors_N: torch.Tensor, keep_N: torch.Tensor, doc_ids_T: torch.Tensor, cu_seqlens_D1: torch.Tensor
    ) -> None:
        """Rebuild spans and tables for these anchors."""
        self.spans.fill(anchors_N, keep_N, doc_ids_T, cu_seqlens_D1)
        for layout, tables in self._tables:
            tables.fill(layout, self.spans)

    def __call__(self, layer: int, q_hQD: torch.Tensor, k_gSD: torch.Tensor, v_gSD: torch.Tensor) -> torch.Tensor:
        return compiled_flex_attention(q_hQD, k_gSD, v_gSD, self.masks[layer])


def compiled_flex_attention(
    q_hQD: torch.Tensor,
    k_gSD: torch.Tensor,
    v_gSD: torch.Tensor,
    mask: BlockMask,
) -> torch.Tensor:
    """FlexAttention with grouped heads, [h, Q, D] -> [h, Q, D]; DenseFallbackError unless torch.compile is tracing it.

    Dynamo folds the first line away in the trace. Every eager route to the dense kernel (not compiled, recompile
    limit reached, a dispatch mode active) runs this Python line and raises.
    """
    # Not is_compiling(): from torch 2.13 that is true here while another thread compiles.
    if not torch.compiler.is_dynamo_compiling():
        raise DenseFallbackError(
            "FlexAttention was called outside torch.compile and would compute every score; compile the function that "
            "calls it with fullgraph=True, or use attention = sdpa"
        )
    out = flex_attention(
        q_hQD[None],
        k_gSD[None],
        v_gSD[None],
        block_mask=mask,
        enable_gqa=q_hQD.shape[0] != k_gSD.shape[0],
    )
    assert isinstance(out, torch.Tensor)
    return out[0]


class SdpaAttention:
    """Scaled-dot-product attention in chunks of blocks, each against the context and its own blocks only.

    Layers with a small window gather their few keys instead (`trainer.model.window`).
    """

    def __init__(self, layouts: Sequence[MaskLayout], chunk_queries: int = 2048) -> None:
        self.layouts = tuple(layouts)
        self.chunk_slots = max(1, chunk_queries // self.layouts[0].block_size)
        self._batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._masks: dict[tuple[MaskLayout, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._windows: dict[MaskLayout, Windows] = {}

    def fill(
        self, anchors_N: torch.Tensor, keep_N: torch.Tensor, doc_ids_T: torch.Tensor, cu_seqlens_D1: torch.Tensor
    ) -> None:
        """Take these anchors; masks are made chunk by chunk when they are first used, and kept until the next fill."""
        self._batch = (anchors_N, keep_N, doc_ids_T)
        self._masks.clear()
        self._windows.clear()

    def __call__(self, layer: int, q_hQD: torch.Tensor, k_gSD: torch.Tensor, v_gSD: torch.Tensor) -> torch.Tensor:
        layout = self.layouts[layer]
        if layout.window is not None and layout.window <= GATHER_LIMIT:
            return window_attention(q_hQD, k_gSD, v_gSD, self._layer_windows(layout), layout)
        groups = q_hQD.shape[0] // k_gSD.shape[0]
        k_hSD, v_hSD = (x.repeat_interleave(groups, dim=0) if groups > 1 else x for x in (k_gSD, v_gSD))
        outs = []
        for low in range(0, layout.slots, self.chunk_slots):
            high = min(layout.slots, low + self.chunk_slots)
            rows = slice(low * layout.block_size, high * layout.block_size)
            own = slice(layout.context + rows.start, layout.context + rows.stop)
            keys, values = (torch.cat((x[:, : layout.context], x[:, own]), dim=1) for x in (k_hSD, v_hSD))
            mask_QS, seen_Q1 = self._chunk_mask(layout, low, high)
            out = F.scaled_dot_product_attention(q_hQD[None, :, rows], keys[None], values[None], attn_mask=mask_QS)
            outs.append(torch.where(seen_Q1, out[0], 0.0))
        return torch.cat(outs, dim=1)

    def _chunk_mask(self, layout: MaskLayout, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots low..high-1 against [context | these slots], empty rows opened; and which rows see anything."""
        if (layout, low) not in self._masks:
            anchors_N, keep_N, doc_ids_T = self._filled()
            mask_QS = dense_mask(
                anchors_N[low:high], keep_N[low:high], doc_ids_T, layout.block_size, layout.window, layout.causal
            )
            self._masks[layout, low] = open_empty_rows(mask_QS)
        return self._masks[layout, low]

    def _layer_windows(self, layout: MaskLayout) -> Windows:
        if layout not in self._windows:
            self._windows[layout] = make_windows(*self._filled(), layout)
        return self._windows[layout]

    def _filled(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._batch is None:
            raise RuntimeError("attention was called before fill(): it does not know the batch's anchors")
        return self._batch


def make_attention(kind: str, layouts: Sequence[MaskLayout], device: torch.device) -> FlexAttention | SdpaAttention:
    """`flex` on a GPU; `sdpa`, and everything on a CPU where FlexAttention has no backward, in chunks."""
    if kind == "flex" and device.type == "cuda":
        return FlexAttention(layouts, device)
    return SdpaAttention(layouts)
