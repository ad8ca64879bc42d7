"""The mask rule against an element-by-element reading of it, and what may and may not influence a block."""

from __future__ import annotations

import pytest
import torch

from trainer.config import DrafterConfig
from trainer.model.anchors import anchor_generator, sample_anchors
from trainer.model.drafter import Drafter, DrafterShape
from trainer.model.mask import attend_dense, attend_sdpa, dense_mask

BLOCK = 4
LENGTHS = (13, 9, 17)
PADDING = 5


def row() -> tuple[torch.Tensor, torch.Tensor]:
    """doc_ids and positions of three documents and a padding tail."""
    doc_ids = [d for d, n in enumerate(LENGTHS) for _ in range(n)] + [-1] * PADDING
    positions = [p for n in (*LENGTHS, PADDING) for p in range(n)]
    return torch.tensor(doc_ids, dtype=torch.int32), torch.tensor(positions)


def slots(count: int = 10, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors closer than a block to each other, and two unused slots."""
    doc_ids, _ = row()
    anchors, keep = sample_anchors(doc_ids >= 0, doc_ids, count, anchor_generator(seed, 0))
    anchors = torch.cat((anchors, torch.full((2,), doc_ids.shape[0], dtype=torch.int32)))
    return anchors, torch.cat((keep, torch.zeros(2, dtype=torch.bool)))


def naive_mask(anchors: list[int], keep: list[bool], docs: list[int], window: int | None, causal: bool) -> torch.Tensor:
    """The rule, one element at a time."""
    tokens, queries = len(docs), len(anchors) * BLOCK
    mask = torch.zeros(queries, tokens + queries, dtype=torch.bool)
    for q in range(queries):
        block, offset = divmod(q, BLOCK)
        if not keep[block]:
            continue
        anchor = anchors[block]
        for k in range(tokens):
            near = window is None or k > anchor + offset - window
            mask[q, k] = k < anchor and docs[k] == docs[anchor] and near
        for other in range(queries):
            other_block, other_offset = divmod(other, BLOCK)
            mask[q, tokens + other] = other_block == block and (not causal or other_offset <= offset)
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_the_vectorised_mask_is_the_rule(window: int | None, causal: bool) -> None:
    """Failed when `<` became `<=` at the anchor, and when the document test was dropped."""
    doc_ids, _ = row()
    anchors, keep = slots()
    expected = naive_mask(anchors.tolist(), keep.tolist(), doc_ids.tolist(), window, causal)
    assert torch.equal(dense_mask(anchors, keep, doc_ids, BLOCK, window, causal), expected)


def test_unused_slots_see_nothing_and_are_not_seen() -> None:
    doc_ids, _ = row()
    anchors, keep = slots()
    mask = dense_mask(anchors, keep, doc_ids, BLOCK)
    unused = ~keep.repeat_interleave(BLOCK)
    assert unused.sum() == 2 * BLOCK
    assert not mask[unused].any()
    assert not mask[:, doc_ids.shape[0] :][:, unused].any()


def test_the_context_never_contains_padding() -> None:
    doc_ids, _ = row()
    anchors, keep = slots()
    assert not dense_mask(anchors, keep, doc_ids, BLOCK)[:, : doc_ids.shape[0]][:, doc_ids < 0].any()


class Net:
    """A small drafter over the row above, with every input in reach."""

    def __init__(self, window: int | None = None, causal: bool = False) -> None:
        config = DrafterConfig(
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            intermediate_size=32,
            block_size=BLOCK,
            sliding_window=window,
            sliding_layers=() if window is None else (0,),
            sliding_causal=causal,
        )
        self.shape = DrafterShape(hidden_size=16, vocab_size=32, num_features=2, rope_theta=1e4, config=config)
        self.drafter = Drafter(self.shape)
        self.doc_ids, self.positions = row()
        self.anchors, self.keep = slots()
        generator = torch.Generator().manual_seed(1)
        self.hidden = torch.randn(self.doc_ids.shape[0], 32, generator=generator)
        self.embeds = torch.randn(self.anchors.shape[0] * BLOCK, 16, generator=generator)
        start = self.positions[self.anchors.long().clamp(max=self.doc_ids.shape[0] - 1)]
        self.block_positions = (start[:, None] + torch.arange(BLOCK)).flatten()
        self.attend = attend_sdpa(self.anchors, self.keep, self.doc_ids, self.shape)

    def __call__(self, hidden: torch.Tensor | None = None, embeds: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.hidden if hidden is None else hidden
        embeds = self.embeds if embeds is None else embeds
        out: torch.Tensor = self.drafter(hidden, self.positions, embeds, self.block_positions, self.attend)
        return out.view(-1, BLOCK, 16)


@pytest.mark.parametrize(("window", "causal"), [(None, False), (5, False), (5, True)])
def test_nothing_at_or_after_the_anchor_or_of_another_document_reaches_a_block(
    window: int | None, causal: bool
) -> None:
    """Failed when the bound was `k <= anchor`: the block then reads the target's state at its own anchor."""
    net = Net(window, causal)
    before = net()
    for slot in range(int(net.keep.sum())):
        anchor = int(net.anchors[slot])
        visible = (net.doc_ids == net.doc_ids[anchor]) & (torch.arange(net.doc_ids.shape[0]) < anchor)
        changed = torch.where(visible[:, None], net.hidden, net.hidden + 100.0)
        assert torch.equal(net(hidden=changed)[slot], before[slot])
        if visible.any():
            moved = net(hidden=torch.where(visible[:, None], net.hidden + 1.0, net.hidden))[slot]
            assert not torch.allclose(moved, before[slot])


def test_blocks_never_see_each_other_even_where_they_overlap() -> None:
    """Failed when block keys were compared by document instead of by slot."""
    net = Net()
    assert (net.anchors[1:][net.keep[1:]] - net.anchors[:-1][net.keep[1:]]).min() < BLOCK, "no overlapping blocks"
    before = net()
    for slot in range(int(net.keep.sum())):
        others = torch.ones(net.anchors.shape[0], dtype=torch.bool)
        others[slot] = False
        changed = net.embeds + 100.0 * others.repeat_interleave(BLOCK)[:, None]
        assert torch.equal(net(embeds=changed)[slot], before[slot])


def test_in_block_attention_is_bidirectional_in_full_layers_and_causal_where_asked() -> None:
    full, causal = Net(), Net(window=5, causal=True)
    causal.drafter.layers = causal.drafter.layers[:1]  # the sliding layer alone
    last = torch.zeros(full.embeds.shape[0], dtype=torch.bool)
    last[BLOCK - 1 :: BLOCK] = True
    for net, first_may_move in ((full, True), (causal, False)):
        moved = net(embeds=net.embeds + last[:, None])[:, 0] - net()[:, 0]
        assert bool((moved[net.keep].abs() > 1e-6).any()) is first_may_move


def test_sdpa_equals_attention_written_out_and_empty_rows_are_zero_with_finite_gradients() -> None:
    """Failed (NaN) when `open_empty_rows` was skipped in the written-out form."""
    net = Net()
    mask = dense_mask(net.anchors, net.keep, net.doc_ids, BLOCK)
    q = torch.randn(4, mask.shape[0], 8, requires_grad=True)
    k, v = torch.randn(2, 2, mask.shape[1], 8)
    fast, plain = net.attend(1, q, k, v), attend_dense(q, k, v, mask)
    assert torch.allclose(fast, plain, atol=1e-6)
    assert not fast[:, -2 * BLOCK :].any()
    (gradient,) = torch.autograd.grad(fast.square().sum(), q)
    assert gradient.isfinite().all()


def test_the_order_of_documents_in_a_row_changes_no_block() -> None:
    """Failed when the mask compared positions alone and not documents."""
    net = Net()
    order = [2, 0, 1]
    starts = [sum(LENGTHS[:d]) for d in range(3)]
    tokens = torch.cat([torch.arange(starts[d], starts[d] + LENGTHS[d]) for d in order])
    tokens = torch.cat((tokens, torch.arange(sum(LENGTHS), sum(LENGTHS) + PADDING)))
    moved_to = torch.empty_like(tokens)
    moved_to[tokens] = torch.arange(tokens.shape[0])
    used = int(net.keep.sum())
    anchors = moved_to[net.anchors[:used].long()].to(torch.int32)
    by_place = anchors.argsort()
    rank = net.doc_ids[tokens]  # the document numbers may be any, as long as they differ
    attend = attend_sdpa(anchors[by_place], net.keep[:used], rank, net.shape)
    embeds = net.embeds.view(-1, BLOCK, 16)[:used][by_place].flatten(0, 1)
    at = net.block_positions.view(-1, BLOCK)[:used][by_place].flatten()
    moved = net.drafter(net.hidden[tokens], net.positions[tokens], embeds, at, attend).view(-1, BLOCK, 16)
    assert torch.allclose(moved, net()[:used][by_place], atol=1e-5)
