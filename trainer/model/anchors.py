"""Anchors and what their blocks are asked: fixed shapes from sampling to labels.

An anchor is a supervised token whose successor is supervised too, in the same document: its block has
at least one label. Sampling runs on the CPU with its own generator, seeded from (seed, batch index), so
a batch has the same anchors on whichever thread and after whichever resume it is packed.
"""

from __future__ import annotations

import hashlib

import torch

DEFAULT_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
"""Decay by block size, from the paper's appendix."""


def default_gamma(block_size: int) -> float:
    """The published decay, and a straight line through the published ones for other block sizes."""
    if block_size in DEFAULT_GAMMA:
        return DEFAULT_GAMMA[block_size]
    return max(1.0, 4.0 + (block_size - 8) * 3.0 / 8.0)


def anchor_generator(seed: int, batch_index: int) -> torch.Generator:
    """A generator for one batch. Hashed: neighbouring seeds of one generator family are correlated."""
    digest = hashlib.blake2b(f"anchors {seed} {batch_index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def valid_anchors(loss_mask_T: torch.Tensor, doc_ids_T: torch.Tensor) -> torch.Tensor:
    """Boolean [T]: the token and its successor are supervised and of one document."""
    valid_T = torch.zeros_like(loss_mask_T)
    valid_T[:-1] = loss_mask_T[:-1] & loss_mask_T[1:] & (doc_ids_T[:-1] == doc_ids_T[1:]) & (doc_ids_T[:-1] >= 0)
    return valid_T


def quotas(slots: int, supervised: list[int], available: list[int]) -> list[int]:
    """Slots of each document, proportional to its supervised tokens, never more than its valid anchors.

    Largest remainders; what a document cannot use goes to the others in the same proportion.
    """
    granted = [0] * len(supervised)
    left = min(slots, sum(available))
    while left:
        open_docs = [d for d in range(len(supervised)) if granted[d] < available[d]]
        weight = sum(supervised[d] for d in open_docs)
        share = {d: left * supervised[d] / weight for d in open_docs}
        given = {d: min(int(share[d]), available[d] - granted[d]) for d in open_docs}
        if not any(given.values()):
            # Fewer slots left than documents: one each, by largest share, then lowest number.
            for d in sorted(open_docs, key=lambda d: (-share[d], d))[:left]:
                given[d] = 1
        for d, count in given.items():
            granted[d] += count
        left -= sum(given.values())
    return granted


def sample_anchors(
    loss_mask_T: torch.Tensor, doc_ids_T: torch.Tensor, slots: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw `slots` anchors: (anchors_N int32 ascending, keep_N bool). Unused slots hold T with keep false.

    Uniform without replacement inside each document. With no valid position every slot is unused; that is
    not an error, the batch simply has no loss.
    """
    tokens = loss_mask_T.shape[0]
    valid_T = valid_anchors(loss_mask_T, doc_ids_T)
    documents = int(doc_ids_T.max().item()) + 1 if tokens else 0
    positions = [torch.nonzero(valid_T & (doc_ids_T == d)).flatten() for d in range(documents)]
    supervised = [int((loss_mask_T & (doc_ids_T == d)).sum()) for d in range(documents)]
    chosen = [
        where[torch.randperm(where.numel(), generator=generator)[:quota]]
        for where, quota in zip(positions, quotas(slots, supervised, [w.numel() for w in positions]), strict=True)
    ]
    anchors_N = torch.full((slots,), tokens, dtype=torch.int32)
    keep_N = torch.zeros(slots, dtype=torch.bool)
    if chosen:
        found = torch.cat(chosen).sort().values
        anchors_N[: found.numel()] = found.to(torch.int32)
        keep_N[: found.numel()] = True
    return anchors_N, keep_N


def labels_and_weights(
    input_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    doc_ids_T: torch.Tensor,
    loss_mask_T: torch.Tensor,
    anchors_N: torch.Tensor,
    keep_N: torch.Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    gamma: float | None = None,
    label_ids_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(block_ids_NB, labels_NB, weights_NB fp32, block_positions_NB), all fixed-shape tensor operations.

    Position k of a block predicts the token at anchor + k itself (masked-LM style, not shifted); k = 0 is
    the given anchor and has no weight. w = keep * [k >= 1] * [same document] * supervised * exp(-(k-1)/gamma).
    `label_ids_T` replaces the text as what is asked (the target's own choices). gamma infinite: no decay.
    Labels outside the row are 0 with weight 0. Runs on any device, inside a captured graph too.
    """
    gamma = gamma if gamma is not None else default_gamma(block_size)
    last = input_ids_T.shape[0] - 1
    device = input_ids_T.device
    offset_B = torch.arange(block_size, device=device)
    anchor_N = anchors_N.long()
    at_NB = anchor_N[:, None] + offset_B
    inside_NB = at_NB <= last
    at_NB = at_NB.clamp(max=last)
    anchor_in_N = anchor_N.clamp(max=last)

    same_NB = doc_ids_T[at_NB] == doc_ids_T[anchor_in_N][:, None]
    counted_NB = inside_NB & same_NB & loss_mask_T[at_NB] & keep_N[:, None] & (offset_B >= 1)
    decay_B = torch.exp((1 - offset_B).float() / gamma)
    weights_NB = counted_NB * decay_B
    asked_T = input_ids_T if label_ids_T is None else label_ids_T
    labels_NB = torch.where(inside_NB, asked_T[at_NB], torch.zeros_like(at_NB))
    masks_NB = torch.full_like(at_NB, mask_token_id)
    block_ids_NB = torch.where(offset_B == 0, input_ids_T[anchor_in_N][:, None], masks_NB)
    block_positions_NB = positions_T[anchor_in_N][:, None] + offset_B
    return block_ids_NB, labels_NB, weights_NB, block_positions_NB


def predicting_rows(anchors_N: torch.Tensor, block_size: int, tokens: int) -> torch.Tensor:
    """Rows of the target that predict a block's drafted places, int64 [N, B-1]: anchor + k - 1, inside the row."""
    offset = torch.arange(block_size - 1, device=anchors_N.device)
    return (anchors_N.long()[:, None] + offset).clamp(max=tokens - 1)
