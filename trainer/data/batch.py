"""The two fixed-shape records that travel down the pipeline.

Shape legend: T context tokens in the packed row (data.token_budget), N block slots (data.block_slots),
D document slots (data.max_documents), B block size, K captured target layers, H target hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One packed row on the CPU; every tensor has the same shape in every batch of a run.

    Documents lie one after another from position 0; the tail of the row is padding with doc id -1.
    """

    index: int
    """Number of this batch in the run, from 0; its anchors are drawn from (run seed, index)."""
    cursor: dict[str, Any]
    """Where the data source stands after this batch: JSON types, enough to resume exactly."""
    input_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64, restart at 0 in each document
    doc_ids_T: torch.Tensor  # int32, 0..documents-1, -1 for padding
    loss_mask_T: torch.Tensor  # bool, true where the token is supervised
    cu_seqlens_D1: torch.Tensor  # int32 [D+1], document bounds, unused entries repeat the last bound
    anchors_N: torch.Tensor  # int32, sorted ascending; unused slots hold T (past every context token)
    keep_N: torch.Tensor  # bool, false for unused slots
    documents: int
    tokens: int
    """Context tokens that are not padding."""
    again: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    """(anchors_N, keep_N) of each further time that this batch is trained on (data.reuse)."""


@dataclass(frozen=True, slots=True)
class HiddenBatch:
    """A PackedBatch with the target's captured hidden states."""

    packed: PackedBatch
    hidden_TKH: torch.Tensor
    """Concatenated outputs of the captured layers, [T, K*H], on the target's device."""
    ready: Any = None
    """A CUDA event recorded on the target's stream after `hidden_TKH` was written; None on CPU."""

    def time(self, before: int) -> HiddenBatch:
        """The batch as it is trained on after `before` times: the same states, other anchors."""
        if before == 0:
            return self
        anchors_N, keep_N = self.packed.again[before - 1]
        return replace(self, packed=replace(self.packed, anchors_N=anchors_N, keep_N=keep_N))
