"""Anchor sampling, quotas, labels and weights, each against the rule read literally."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.model.anchors import (
    anchor_generator,
    default_gamma,
    labels_and_weights,
    quotas,
    sample_anchors,
    valid_anchors,
)

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=0, max_size=5)


def lay_out(documents: list[list[bool]], padding: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    loss_mask = [m for d in documents for m in d] + [False] * padding
    doc_ids = [n for n, d in enumerate(documents) for _ in d] + [-1] * padding
    return torch.tensor(loss_mask), torch.tensor(doc_ids, dtype=torch.int32)


@given(masks, st.integers(1, 40), st.integers(0, 5))
def test_anchors_are_valid_distinct_sorted_and_as_many_as_can_be(
    documents: list[list[bool]], slots: int, seed: int
) -> None:
    """Failed when the successor was not required to be of the same document."""
    loss_mask, doc_ids = lay_out(documents)
    anchors, keep = sample_anchors(loss_mask, doc_ids, slots, anchor_generator(seed, 7))
    assert anchors.shape == keep.shape == (slots,)
    assert anchors.dtype == torch.int32
    chosen = anchors[keep].tolist()
    assert chosen == sorted(set(chosen))
    rule = [
        a
        for a in range(loss_mask.shape[0] - 1)
        if loss_mask[a] and loss_mask[a + 1] and doc_ids[a] == doc_ids[a + 1] and doc_ids[a] >= 0
    ]
    assert set(chosen) <= set(rule)
    assert torch.nonzero(valid_anchors(loss_mask, doc_ids)).flatten().tolist() == rule
    assert len(chosen) == min(slots, len(rule))
    assert (anchors[~keep] == loss_mask.shape[0]).all()
    assert keep.tolist() == sorted(keep.tolist(), reverse=True)


def test_no_valid_position_leaves_every_slot_unused() -> None:
    loss_mask, doc_ids = lay_out([[True, False, True], [False]])
    anchors, keep = sample_anchors(loss_mask, doc_ids, 4, anchor_generator(0, 0))
    assert not keep.any()
    assert anchors.tolist() == [7, 7, 7, 7]


@given(st.integers(0, 60), st.lists(st.tuples(st.integers(2, 50), st.integers(0, 50)), max_size=6))
def test_quotas_use_all_slots_and_never_exceed_what_is_there(slots: int, documents: list[tuple[int, int]]) -> None:
    supervised = [s for s, _ in documents]
    available = [min(a, s - 1) for s, a in documents]
    granted = quotas(slots, supervised, available)
    assert all(0 <= g <= a for g, a in zip(granted, available, strict=True))
    assert sum(granted) == min(slots, sum(available))


def test_quotas_are_proportional_to_supervised_tokens() -> None:
    """Failed with one equal share for each document."""
    assert quotas(40, [100, 300], [99, 299]) == [10, 30]
    assert quotas(40, [100, 300], [99, 5]) == [35, 5], "what one document cannot use goes to the other"
    assert quotas(1, [100, 300, 300], [9, 9, 9]) == [0, 1, 0]


def test_the_same_seed_and_batch_give_the_same_anchors_whatever_was_drawn_before() -> None:
    loss_mask, doc_ids = lay_out([[True] * 200])
    first = sample_anchors(loss_mask, doc_ids, 16, anchor_generator(5, 9))[0]
    torch.rand(10)
    sample_anchors(loss_mask, doc_ids, 16, anchor_generator(5, 8))
    assert torch.equal(first, sample_anchors(loss_mask, doc_ids, 16, anchor_generator(5, 9))[0])
    assert not torch.equal(first, sample_anchors(loss_mask, doc_ids, 16, anchor_generator(5, 10))[0])
    assert not torch.equal(first, sample_anchors(loss_mask, doc_ids, 16, anchor_generator(6, 9))[0])


@pytest.mark.parametrize(("block", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_published_decays(block: int, gamma: float) -> None:
    assert default_gamma(block) == gamma


@given(masks.filter(bool), st.integers(1, 12), st.integers(2, 6))
def test_labels_and_weights_follow_the_rule(documents: list[list[bool]], slots: int, block: int) -> None:
    """Failed when labels were shifted by one, and when decay counted from k instead of k - 1."""
    loss_mask, doc_ids = lay_out(documents)
    tokens = loss_mask.shape[0]
    input_ids = torch.arange(100, 100 + tokens)
    positions = torch.tensor([p for d in documents for p in range(len(d))] + [0, 1, 2])
    anchors, keep = sample_anchors(loss_mask, doc_ids, slots, anchor_generator(0, 0))
    ids, labels, weights, at = labels_and_weights(
        input_ids, positions, doc_ids, loss_mask, anchors, keep, block_size=block, mask_token_id=7, gamma=3.0
    )
    assert ids.shape == labels.shape == weights.shape == at.shape == (slots, block)
    for n in range(slots):
        a = int(anchors[n])
        if not keep[n]:
            assert not weights[n].any()
            continue
        assert ids[n].tolist() == [100 + a] + [7] * (block - 1)
        assert at[n].tolist() == [int(positions[a]) + k for k in range(block)]
        for k in range(block):
            inside = a + k < tokens and bool(doc_ids[a + k] == doc_ids[a])
            expected = math.exp(-(k - 1) / 3.0) if k >= 1 and inside and bool(loss_mask[a + k]) else 0.0
            assert float(weights[n, k]) == pytest.approx(expected)
            if expected:
                assert int(labels[n, k]) == 100 + a + k
