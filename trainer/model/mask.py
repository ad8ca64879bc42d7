"""Which keys a block position may see: the dense oracle that every fast path is tested against.

Shape legend as in drafter.py. Keys are [context 0..T-1 | block positions T..T+Q-1].

The rule (DFlash paper; the strict bound is what serving can honour, for at inference the anchor is the
token just sampled, whose target state does not exist yet):
- context key k: same document as the anchor and k < anchor, strictly;
  sliding layers further require k > position(query) - window, the window counting the query's own place;
- block key: the same block; in a causal layer, only up to the query's own place;
- a padding slot sees nothing and is seen by nothing.
Visibility goes by original position, never by block number: blocks closer than B overlap and would leak.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from trainer.model.drafter import Attend, DrafterShape


def anchor_documents(anchors_N: torch.Tensor, doc_ids_T: torch.Tensor) -> torch.Tensor:
    """Document of each anchor [N]; unused slots (anchor T) read the last token and must be masked by `keep`."""
    return doc_ids_T[anchors_N.long().clamp(max=doc_ids_T.shape[0] - 1)]


def dense_mask(
    anchors_N: torch.Tensor,
    keep_N: torch.Tensor,
    doc_ids_T: torch.Tensor,
    block_size: int,
    window: int | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Boolean [Q, T+Q], true where query (row) sees key (column)."""
    device = anchors_N.device
    slots, tokens = anchors_N.shape[0], doc_ids_T.shape[0]
    offset_Q = torch.arange(block_size, device=device).repeat(slots)
    block_Q = torch.arange(slots, device=device).repeat_interleave(block_size)
    anchor_Q = anchors_N.long().repeat_interleave(block_size)
    keep_Q = keep_N.repeat_interleave(block_size)
    document_Q = anchor_documents(anchors_N, doc_ids_T).repeat_interleave(block_size)

    key_T = torch.arange(tokens, device=device)
    context = (key_T < anchor_Q[:, None]) & (doc_ids_T == document_Q[:, None]) & keep_Q[:, None]
    if window is not None:
        context &= key_T > (anchor_Q + offset_Q)[:, None] - window
    block = (block_Q[:, None] == block_Q) & keep_Q[:, None]
    if causal:
        block &= offset_Q <= offset_Q[:, None]
    return torch.cat((context, block), dim=1)


def attend_dense(q_HQD: torch.Tensor, k_HkD: torch.Tensor, v_HkD: torch.Tensor, mask_QS: torch.Tensor) -> torch.Tensor:
    """Attention written out in fp32 [h,Q,D]: the naive reference. A row that sees nothing gives zero."""
    groups = q_HQD.shape[0] // k_HkD.shape[0]
    keys, values = (x.float().repeat_interleave(groups, dim=0) for x in (k_HkD, v_HkD))
    scores = (q_HQD.float() @ keys.transpose(1, 2)) * q_HQD.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask_QS, float("-inf")).softmax(-1)
    weights = torch.where(mask_QS, weights, torch.zeros_like(weights))  # softmax of an empty row is NaN
    return (weights @ values).to(q_HQD.dtype)


def open_empty_rows(mask_QS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For kernels whose softmax must not meet an empty row: (mask with empty rows opened, row flags [Q, 1]).

    Multiply the kernel's output by the flags and an empty row gives zero, in value and in gradient.
    """
    seen_Q1 = mask_QS.any(dim=1, keepdim=True)
    return mask_QS | ~seen_Q1, seen_Q1


def attend_sdpa(anchors_N: torch.Tensor, keep_N: torch.Tensor, doc_ids_T: torch.Tensor, shape: DrafterShape) -> Attend:
    """The attention of one row through SDPA with dense masks: for evaluation, tests and small runs."""
    kinds = {(shape.window(i), shape.causal(i)) for i in range(shape.config.num_layers)}
    masks = {kind: open_empty_rows(dense_mask(anchors_N, keep_N, doc_ids_T, shape.block_size, *kind)) for kind in kinds}

    def attend(layer_index: int, q_HQD: torch.Tensor, k_HkD: torch.Tensor, v_HkD: torch.Tensor) -> torch.Tensor:
        mask_QS, seen_Q1 = masks[shape.window(layer_index), shape.causal(layer_index)]
        # A fourth dimension in front: the fused CPU and GPU kernels take batched input only.
        mixed = scaled_dot_product_attention(q_HQD[None], k_HkD[None], v_HkD[None], attn_mask=mask_QS, enable_gqa=True)
        return mixed[0] * seen_Q1

    return attend
