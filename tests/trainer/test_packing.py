"""First fit and the packed row's fixed shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.packing import Document, first_fit, pack


def document(length: int, first: int = 0) -> Document:
    return Document(f"d{first}", torch.arange(first, first + length), torch.ones(length, dtype=torch.bool))


@given(st.lists(st.integers(1, 20), max_size=20), st.integers(1, 60), st.integers(1, 8))
def test_first_fit_takes_in_order_what_fits_and_leaves_only_what_does_not(
    lengths: list[int], budget: int, documents: int
) -> None:
    """Failed when it stopped at the first document that did not fit."""
    chosen = first_fit(lengths, budget, documents)
    assert chosen == sorted(set(chosen))
    assert sum(lengths[n] for n in chosen) <= budget
    assert len(chosen) <= documents
    for n, length in enumerate(lengths):
        if n not in chosen:
            before = [m for m in chosen if m < n]
            assert len(before) == documents or sum(lengths[m] for m in before) + length > budget


def test_a_row_holds_its_documents_one_after_another() -> None:
    row = pack(
        [document(4, 10), document(3, 50)],
        index=6,
        cursor={"at": 1},
        token_budget=10,
        block_slots=8,
        max_documents=4,
        run_seed=0,
    )
    assert row.input_ids_T.tolist() == [10, 11, 12, 13, 50, 51, 52, 0, 0, 0]
    assert row.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    assert row.doc_ids_T.tolist() == [0] * 4 + [1] * 3 + [-1] * 3
    assert row.loss_mask_T.tolist() == [True] * 7 + [False] * 3
    assert row.cu_seqlens_D1.tolist() == [0, 4, 7, 7, 7]
    assert (row.tokens, row.documents, row.index, row.cursor) == (7, 2, 6, {"at": 1})
    assert row.anchors_N[row.keep_N].tolist() == [0, 1, 2, 4, 5]


def test_shapes_and_types_never_change() -> None:
    def record(lengths: list[int]) -> list[tuple[object, ...]]:
        row = pack(
            [document(n) for n in lengths],
            index=0,
            cursor={},
            token_budget=30,
            block_slots=5,
            max_documents=6,
            run_seed=0,
        )
        fields = [getattr(row, name) for name in row.__dataclass_fields__ if name.endswith(("_T", "_N", "_D1"))]
        return [(tuple(f.shape), f.dtype) for f in fields]

    assert record([30]) == record([1]) == record([5, 5, 5, 5, 5, 5]) == record([])


def test_documents_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        pack([document(9)], index=0, cursor={}, token_budget=8, block_slots=5, max_documents=6, run_seed=0)
