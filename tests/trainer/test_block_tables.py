"""Block tables against the mask they stand for, evaluated pair by pair.

Seen to fail: with the own-block tile left out, with `<=` for the anchor, with full tiles not limited to whole query
tiles, with the window's `+ 1` dropped.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention.flex_attention import create_block_mask

from tests.trainer.mask_cases import cases, pairwise_mask, spans_of
from trainer.model.block_tables import (
    BlockTables,
    MaskLayout,
    build_block_mask,
    classify_tiles,
)


def tiles_of(mask: torch.Tensor, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (-(-n // tile) * tile for n in mask.shape)
    padded = torch.zeros(rows, columns, dtype=torch.bool)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    grid = padded.view(rows // tile, tile, columns // tile, tile).transpose(1, 2)
    return grid.flatten(2).any(-1), grid.flatten(2).all(-1)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_tiles_are_exactly_those_that_the_mask_needs(case: tuple[MaskLayout, dict[str, torch.Tensor]]) -> None:
    layout, batch = case
    partial, full = classify_tiles(layout, spans_of(layout, batch))
    needed, covered = tiles_of(pairwise_mask(layout, batch), layout.tile)
    assert torch.equal(partial | full, needed)
    assert not (partial & full).any()
    assert not (full & ~covered).any()
    whole_context = (torch.arange(layout.key_tiles) + 1) * layout.tile <= layout.context
    assert torch.equal(full, covered & whole_context)


@settings(max_examples=25, deadline=None)
@given(cases())
def test_mask_function_and_tables_equal_create_block_mask(case: tuple[MaskLayout, dict[str, torch.Tensor]]) -> None:
    layout, batch = case
    spans = spans_of(layout, batch)
    tables = BlockTables.empty(layout, torch.device("cpu"))
    tables.fill(layout, spans)
    mine = build_block_mask(layout, spans, tables)
    oracle = pairwise_mask(layout, batch)
    theirs = create_block_mask(
        lambda b, h, q, k: oracle[q, k], None, None, layout.queries, layout.keys, "cpu", BLOCK_SIZE=layout.tile
    )
    assert torch.equal(mine.to_dense(), theirs.to_dense())
    q, k = torch.arange(layout.queries)[:, None], torch.arange(layout.keys)
    assert torch.equal(mine.mask_mod(torch.tensor(0), torch.tensor(0), q, k), oracle)
    for count, index, q_count, q_index in (
        (mine.kv_num_blocks, mine.kv_indices, mine.q_num_blocks, mine.q_indices),
        (mine.full_kv_num_blocks, mine.full_kv_indices, mine.full_q_num_blocks, mine.full_q_indices),
    ):
        forward = {(i, j) for i in range(layout.query_tiles) for j in index[0, 0, i, : count[0, 0, i]].tolist()}
        backward = {(i, j) for j in range(layout.key_tiles) for i in q_index[0, 0, j, : q_count[0, 0, j]].tolist()}
        assert forward == backward
        assert len(forward) == int(count.sum())


def test_refilling_leaves_nothing_of_the_batch_before() -> None:
    """Broken by skipping the copy of the transposed tables."""
    layout = MaskLayout(context=96, slots=8, block_size=4, tile=16)
    one = {
        "anchors_N": torch.arange(8, dtype=torch.int32) * 11 + 5,
        "keep_N": torch.ones(8, dtype=torch.bool),
        "doc_ids_T": torch.zeros(96, dtype=torch.int32),
        "cu_seqlens_D1": torch.tensor([0, 96, 96], dtype=torch.int32),
    }
    two = one | {"anchors_N": one["anchors_N"].flip(0).sort().values // 3, "keep_N": torch.arange(8) < 5}
    tables, fresh = (BlockTables.empty(layout, torch.device("cpu")) for _ in range(2))
    spans = spans_of(layout, one)
    addresses = [tables.kv_index.data_ptr(), tables.q_index.data_ptr()]
    tables.fill(layout, spans)
    spans.fill(**two)
    tables.fill(layout, spans)
    fresh.fill(layout, spans_of(layout, two))
    assert addresses == [tables.kv_index.data_ptr(), tables.q_index.data_ptr()]
    for name in BlockTables.__dataclass_fields__:
        assert torch.equal(getattr(tables, name), getattr(fresh, name)), name


@pytest.mark.parametrize("window", [None, 100])
def test_the_default_tile_at_a_real_shape(window: int | None) -> None:
    """Full tiles carry most of the context: that is where FlexAttention skips the mask."""
    layout = MaskLayout(context=4096, slots=512, block_size=16, window=window)
    batch = {
        "anchors_N": torch.arange(512, dtype=torch.int32) * 8,
        "keep_N": torch.ones(512, dtype=torch.bool),
        "doc_ids_T": torch.zeros(4096, dtype=torch.int32),
        "cu_seqlens_D1": torch.tensor([0, 4096], dtype=torch.int32),
    }
    partial, full = classify_tiles(layout, spans_of(layout, batch))
    assert partial.shape == (64, 96)
    assert int(partial.sum()) <= 64 * 3
    assert int(full.sum()) == (0 if window else sum(i // 2 for i in range(64)))
    assert replace(layout, causal=True) != layout
