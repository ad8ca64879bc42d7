"""FlexAttention's block tables for the DFlash mask, built from anchors and document bounds.

`create_block_mask` evaluates the mask at every (query, key) pair before it can say which tiles are empty. The
DFlash mask needs none of that: the context a block sees is one interval, [start of its document, its anchor),
and beside it the block sees itself. So whether a tile is empty, partial or full follows from interval
arithmetic on tiles, with fixed shapes and no host synchronisation: it can run inside a CUDA graph.

Shape legend: T context tokens, N block slots, B block size, Q = N * B queries, I query tiles, J key tiles,
M blocks that can touch one query tile. Keys are [context 0..T-1 | block 0 | ... | block N-1].
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch.nn.attention.flex_attention import BlockMask

TILE = 128
"""Rows and columns of one tile: FlexAttention's default sparse block."""


@dataclass(frozen=True, slots=True)
class MaskLayout:
    """The static part of the mask: nothing here changes between steps."""

    context: int
    """T."""
    slots: int
    """N."""
    block_size: int
    """B."""
    window: int | None = None
    """W: a query at position p sees context positions > p - W; None: the whole context before the anchor."""
    causal: bool = False
    """Inside a block, a query sees only keys at or before its own offset."""
    tile: int = TILE

    @property
    def queries(self) -> int:
        return self.slots * self.block_size

    @property
    def keys(self) -> int:
        return self.context + self.queries

    @property
    def query_tiles(self) -> int:
        return -(-self.queries // self.tile)

    @property
    def key_tiles(self) -> int:
        return -(-self.keys // self.tile)


@dataclass(frozen=True, slots=True)
class ContextSpans:
    """What each block slot sees of the context: keys start_N[n] <= k < stop_N[n]; stop -1 marks an unused slot."""

    start_N: torch.Tensor  # int32
    stop_N: torch.Tensor  # int32

    @classmethod
    def empty(cls, slots: int, device: torch.device) -> ContextSpans:
        return cls(
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.full((slots,), -1, dtype=torch.int32, device=device),
        )

    def fill(
        self, anchors_N: torch.Tensor, keep_N: torch.Tensor, doc_ids_T: torch.Tensor, cu_seqlens_D1: torch.Tensor
    ) -> None:
        """Write the spans of these anchors into the same storage; no host synchronisation."""
        last = doc_ids_T.shape[0] - 1
        doc_N = doc_ids_T[anchors_N.clamp(0, last).long()].clamp(min=0).long()
        self.start_N.copy_(cu_seqlens_D1[doc_N])
        self.stop_N.copy_(torch.where(keep_N, anchors_N, -1))


@dataclass(frozen=True, slots=True)
class BlockTables:
    """The eight tables of a BlockMask, int32; `*_count` is [1, 1, rows], `*_index` is [1, 1, rows, columns]."""

    kv_count: torch.Tensor
    kv_index: torch.Tensor
    full_kv_count: torch.Tensor
    full_kv_index: torch.Tensor
    q_count: torch.Tensor
    q_index: torch.Tensor
    full_q_count: torch.Tensor
    full_q_index: torch.Tensor

    @classmethod
    def empty(cls, layout: MaskLayout, device: torch.device) -> BlockTables:
        rows, columns = layout.query_tiles, layout.key_tiles

        def count(n: int) -> torch.Tensor:
            return torch.zeros(1, 1, n, dtype=torch.int32, device=device)

        def index(n: int, m: int) -> torch.Tensor:
            return torch.zeros(1, 1, n, m, dtype=torch.int32, device=device)

        return cls(
            *(make for _ in range(2) for make in (count(rows), index(rows, columns))),
            *(make for _ in range(2) for make in (count(columns), index(columns, rows))),
        )

    def fill(self, layout: MaskLayout, spans: ContextSpans) -> None:
        """Write the tables of these spans into the same storage; no host synchronisation."""
        partial_IJ, full_IJ = classify_tiles(layout, spans)
        built = (
            *_ordered(partial_IJ),
            *_ordered(full_IJ),
            *_ordered(partial_IJ.T),
            *_ordered(full_IJ.T),
        )
        for mine, new in zip((getattr(self, f.name) for f in fields(self)), built, strict=True):
            mine.copy_(new.view(mine.shape))


def classify_tiles(layout: MaskLayout, spans: ContextSpans) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tiles hold some visible pair but not only visible pairs, and which hold only visible pairs.

    Returns (partial_IJ, full_IJ), bool, disjoint. A tile that reaches past the last query or key is never full.
    """
    device, tile, block = spans.start_N.device, layout.tile, layout.block_size
    touching = (tile - 2) // block + 2  # M: a tile of rows that is not aligned to blocks touches one more
    row_I = torch.arange(layout.query_tiles, device=device, dtype=torch.int32) * tile
    slot_IM = row_I[:, None] // block + torch.arange(touching, device=device, dtype=torch.int32)
    first_IM = (row_I[:, None] - slot_IM * block).clamp(min=0)  # offsets of this slot's rows inside the tile
    last_IM = (row_I[:, None] + tile - 1 - slot_IM * block).clamp(max=block - 1)
    real_IM = (slot_IM < layout.slots) & (last_IM >= first_IM)
    inside_IM = slot_IM.clamp(max=layout.slots - 1).long()
    start_IM, stop_IM = spans.start_N[inside_IM], spans.stop_N[inside_IM]
    used_IM = real_IM & (stop_IM >= 0)
    low_IM = high_IM = start_IM
    if layout.window is not None:
        low_IM = torch.maximum(start_IM, stop_IM + first_IM - layout.window + 1)
        high_IM = torch.maximum(start_IM, stop_IM + last_IM - layout.window + 1)

    key_J = torch.arange(layout.key_tiles, device=device, dtype=torch.int32) * tile
    context_end_J = (key_J + tile).clamp(max=layout.context)
    sees_IMJ = torch.maximum(low_IM[..., None], key_J) < torch.minimum(stop_IM[..., None], context_end_J)
    own_IM = layout.context + slot_IM * block
    own_end_IM = own_IM + (last_IM + 1 if layout.causal else block)
    sees_IMJ |= (own_IM[..., None] < key_J + tile) & (own_end_IM[..., None] > key_J)
    any_IJ = (sees_IMJ & used_IM[..., None]).any(1)

    covers_IMJ = (high_IM[..., None] <= key_J) & (stop_IM[..., None] >= key_J + tile)
    whole_J = key_J + tile <= layout.context
    whole_I = row_I + tile <= layout.queries
    covered_IJ = ((covers_IMJ & used_IM[..., None]) | ~real_IM[..., None]).all(1)
    full_IJ = covered_IJ & whole_J & whole_I[:, None]
    return any_IJ & ~full_IJ, full_IJ


def _ordered(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: how many tiles, and their columns in ascending order, packed to the left."""
    rows, columns = tiles.shape
    rank = tiles.cumsum(1, dtype=torch.int32)
    slot = torch.where(tiles, rank - 1, columns).long()  # tiles that are not needed go to a spare column
    index = torch.zeros(rows, columns + 1, dtype=torch.int32, device=tiles.device)
    column = torch.arange(columns, dtype=torch.int32, device=tiles.device).expand(rows, columns)
    index.scatter_(1, slot, column)
    return rank[:, -1], index[:, :columns]


def build_block_mask(layout: MaskLayout, spans: ContextSpans, tables: BlockTables) -> BlockMask:
    """A BlockMask over persistent tables: refill the tables and spans, and the same object describes the new mask."""
    start_N, stop_N = spans.start_N, spans.stop_N
    context, block = layout.context, layout.block_size
    window, causal = layout.window, layout.causal

    def visible(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        slot = q // block
        stop = stop_N[slot]
        in_context = (k < context) & (k >= start_N[slot]) & (k < stop)
        if window is not None:
            in_context = in_context & (k > stop + q % block - window)
        in_block = (k >= context) & ((k - context) // block == slot) & (stop >= 0)
        if causal:
            in_block = in_block & ((k - context) % block <= q % block)
        return in_context | in_block

    return BlockMask(
        seq_lengths=(layout.queries, layout.keys),
        kv_num_blocks=tables.kv_count,
        kv_indices=tables.kv_index,
        full_kv_num_blocks=tables.full_kv_count,
        full_kv_indices=tables.full_kv_index,
        q_num_blocks=tables.q_count,
        q_indices=tables.q_index,
        full_q_num_blocks=tables.full_q_count,
        full_q_indices=tables.full_q_index,
        BLOCK_SIZE=(layout.tile, layout.tile),
        mask_mod=visible,
    )
