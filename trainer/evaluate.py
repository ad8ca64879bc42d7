"""Teacher-forced acceptance length on held-out documents.

At evenly spaced anchors of each document the drafter drafts one block, and the leading run of drafted
tokens equal to the document's own tokens counts, plus one for the bonus token the target always adds
(the convention of the DFlash paper and of SGLang). On text the target itself wrote greedily this equals
what true speculative decoding accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding

from trainer.config import DataConfig
from trainer.data.batch import PackedBatch
from trainer.data.packing import Document, first_fit, pack
from trainer.model.anchors import labels_and_weights, valid_anchors
from trainer.model.drafter import Attend, Drafter, DrafterShape
from trainer.model.loss import accept_lengths, block_loss
from trainer.model.mask import attend_sdpa
from trainer.model.targets import Target

ANCHORS_PER_DOCUMENT = 16

MakeAttend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DrafterShape], Attend]
"""(anchors_N, keep_N, doc_ids_T, shape) -> the attention of one row, all on one device."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance over many rounds; a round is one drafted block."""

    mean: float
    """Tokens a round yields, the bonus token included: 1 to block_size."""
    by_position: tuple[float, ...]
    """Share of rounds whose first k drafted tokens were all right, k = 1 .. block_size - 1."""
    rounds: int


def even_anchors(document: Document, count: int, block_size: int) -> list[int]:
    """Up to `count` evenly spaced anchors, each with a whole supervised block after it where there are any.

    A block cut short by the document's end cannot reach its full length and would bias the mean down.
    """
    valid = valid_anchors(document.loss_mask, torch.zeros(len(document), dtype=torch.int32))
    whole = valid.clone()
    supervised = document.loss_mask
    for offset in range(2, block_size):
        whole[: len(document) - offset] &= supervised[offset:]
        whole[max(0, len(document) - offset) :] = False
    places: list[int] = torch.nonzero(whole if bool(whole.any()) else valid).flatten().tolist()
    if len(places) <= count:
        return places
    return [places[(2 * i + 1) * len(places) // (2 * count)] for i in range(count)]


def evaluation_rows(
    documents: Sequence[Document], config: DataConfig, block_size: int, anchors_per_document: int
) -> list[PackedBatch]:
    """All documents in packed rows of the training shape, with fixed evenly spaced anchors."""
    rows: list[PackedBatch] = []
    left = list(documents)
    per_document = min(anchors_per_document, config.block_slots)
    documents_in_row = min(config.max_documents, config.block_slots // per_document)
    while left:
        chosen = first_fit([len(d) for d in left], config.token_budget, documents_in_row)
        anchors_N = torch.full((config.block_slots,), config.token_budget, dtype=torch.int32)
        start, places = 0, []
        for number in chosen:
            places += [start + a for a in even_anchors(left[number], per_document, block_size)]
            start += len(left[number])
        anchors_N[: len(places)] = torch.tensor(places, dtype=torch.int32)
        rows.append(
            pack(
                [left[n] for n in chosen],
                index=len(rows),
                cursor={},
                token_budget=config.token_budget,
                block_slots=config.block_slots,
                max_documents=config.max_documents,
                run_seed=0,
                anchors=(anchors_N, torch.arange(config.block_slots) < len(places)),
            )
        )
        taken = set(chosen)
        left = [d for n, d in enumerate(left) if n not in taken]
    return rows


class TeacherForced:
    """Held-out rows with their target states, computed once; `measure` then costs the drafter alone.

    Every call has the same shapes, so a compiled drafter does not recompile.
    """

    def __init__(
        self,
        target: Target,
        documents: Sequence[Document],
        config: DataConfig,
        *,
        block_size: int,
        mask_token_id: int,
        anchors_per_document: int = ANCHORS_PER_DOCUMENT,
        store: torch.device | str = "cpu",
    ) -> None:
        """`store` is where the target states wait between calls."""
        self._target = target
        self._block_size = block_size
        self._mask_token_id = mask_token_id
        self._rows = evaluation_rows(documents, config, block_size, anchors_per_document)
        self._states = [target.hidden_states(row).to(store) for row in self._rows]

    @torch.no_grad()
    def measure(
        self,
        drafter: Drafter,
        *,
        make_attend: MakeAttend = attend_sdpa,
        chunk_rows: int = 4096,
    ) -> Acceptance:
        """Run the drafter over every held-out row, on the drafter's own device and in its own type."""
        parameter = next(drafter.parameters())
        device, dtype = parameter.device, parameter.dtype
        embed_VH = self._target.embed_VH.to(device, dtype)
        head_VH = self._target.head_VH.to(device, dtype)
        size = self._block_size
        runs: list[torch.Tensor] = []
        for row, states in zip(self._rows, self._states, strict=True):
            input_ids_T, positions_T = row.input_ids_T.to(device), row.positions_T.to(device)
            doc_ids_T, loss_mask_T = row.doc_ids_T.to(device), row.loss_mask_T.to(device)
            anchors_N, keep_N = row.anchors_N.to(device), row.keep_N.to(device)
            ids_NB, labels_NB, weights_NB, positions_NB = labels_and_weights(
                input_ids_T,
                positions_T,
                doc_ids_T,
                loss_mask_T,
                anchors_N,
                keep_N,
                block_size=size,
                mask_token_id=self._mask_token_id,
            )
            hidden_QH = drafter(
                states.to(device, dtype),
                positions_T,
                embedding(ids_NB.flatten(), embed_VH),
                positions_NB.flatten(),
                make_attend(anchors_N, keep_N, doc_ids_T, drafter.shape),
            )
            weights_Q = weights_NB.flatten()
            sums = block_loss(hidden_QH, head_VH, labels_NB.flatten(), weights_Q, chunk_rows)
            lengths_N = accept_lengths(sums.hits_Q, weights_Q, size)
            runs.append(torch.where(weights_NB.any(dim=1), lengths_N, torch.zeros_like(lengths_N)))
        lengths = torch.cat(runs) if runs else torch.zeros(0)
        lengths = lengths[lengths > 0].cpu()  # the one wait for the device
        if lengths.numel() == 0:
            return Acceptance(mean=0.0, by_position=(0.0,) * (size - 1), rounds=0)
        by_position = tuple(float((lengths > k).float().mean()) for k in range(1, size))
        return Acceptance(mean=float(lengths.mean()), by_position=by_position, rounds=int(lengths.numel()))


def acceptance(
    drafter: Drafter,
    target: Target,
    documents: Sequence[Document],
    config: DataConfig,
    *,
    mask_token_id: int,
    anchors_per_document: int = ANCHORS_PER_DOCUMENT,
    make_attend: MakeAttend = attend_sdpa,
) -> Acceptance:
    """One measurement, from documents to numbers; `TeacherForced` when it is repeated."""
    heldout = TeacherForced(
        target,
        documents,
        config,
        block_size=drafter.shape.block_size,
        mask_token_id=mask_token_id,
        anchors_per_document=anchors_per_document,
    )
    return heldout.measure(drafter, make_attend=make_attend)
