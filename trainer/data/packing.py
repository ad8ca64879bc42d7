"""Documents into one packed row of fixed shape, first fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.data.batch import PackedBatch
from trainer.data.order import seed_for
from trainer.model.anchors import anchor_generator, sample_anchors


@dataclass(frozen=True, slots=True)
class Document:
    """A tokenised document, or a piece of one that was longer than data.max_document_tokens."""

    name: str
    input_ids: torch.Tensor  # int64 [length]
    loss_mask: torch.Tensor  # bool [length]

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def trainable(self) -> bool:
        """Whether it has two consecutive supervised tokens, so at least one anchor."""
        return bool((self.loss_mask[:-1] & self.loss_mask[1:]).any())


def first_fit(lengths: Sequence[int], token_budget: int, max_documents: int) -> list[int]:
    """Which of the candidates, in their order, go into one row: each that still fits both budgets."""
    chosen: list[int] = []
    left = token_budget
    for number, length in enumerate(lengths):
        if len(chosen) == max_documents:
            break
        if length <= left:
            chosen.append(number)
            left -= length
    return chosen


def pack(
    documents: Sequence[Document],
    *,
    index: int,
    cursor: dict[str, Any],
    token_budget: int,
    block_slots: int,
    max_documents: int,
    run_seed: int,
    anchors: tuple[torch.Tensor, torch.Tensor] | None = None,
    reuse: int = 1,
) -> PackedBatch:
    """Lay documents one after another and draw their anchors (or take `anchors`, for evaluation).

    With `reuse` further anchors are drawn for each further time that the batch will be trained on.
    """
    lengths = [len(document) for document in documents]
    total = sum(lengths)
    if total > token_budget or len(documents) > max_documents:
        raise ValueError(f"{len(documents)} documents of {total} tokens do not fit {max_documents} x {token_budget}")
    input_ids_T = torch.zeros(token_budget, dtype=torch.int64)
    positions_T = torch.zeros(token_budget, dtype=torch.int64)
    doc_ids_T = torch.full((token_budget,), -1, dtype=torch.int32)
    loss_mask_T = torch.zeros(token_budget, dtype=torch.bool)
    cu_seqlens_D1 = torch.full((max_documents + 1,), total, dtype=torch.int32)
    start = 0
    for number, document in enumerate(documents):
        end = start + lengths[number]
        input_ids_T[start:end] = document.input_ids
        positions_T[start:end] = torch.arange(lengths[number])
        doc_ids_T[start:end] = number
        loss_mask_T[start:end] = document.loss_mask
        cu_seqlens_D1[number] = start
        start = end
    # The padding tail counts its own positions, so that code which finds documents by position 0 finds it too.
    positions_T[total:] = torch.arange(token_budget - total)
    if anchors is None:
        anchors = sample_anchors(loss_mask_T, doc_ids_T, block_slots, anchor_generator(run_seed, index))
    again = [torch.Generator().manual_seed(seed_for("anchors", run_seed, index, before)) for before in range(1, reuse)]
    return PackedBatch(
        index=index,
        cursor=cursor,
        input_ids_T=input_ids_T,
        positions_T=positions_T,
        doc_ids_T=doc_ids_T,
        loss_mask_T=loss_mask_T,
        cu_seqlens_D1=cu_seqlens_D1,
        anchors_N=anchors[0],
        keep_N=anchors[1],
        documents=len(documents),
        tokens=total,
        again=tuple(sample_anchors(loss_mask_T, doc_ids_T, block_slots, generator) for generator in again),
    )
