"""Sliding-window attention of the drafter by gathering: each block reads its own few context keys and itself.

A block with anchor a sees context positions a - W + 1 .. a - 1 at most, so a window of a few tokens needs W - 1 + B
keys a block instead of the whole row: on a CPU, 20 times less work than a masked row of 512 tokens.

Shape legend: T context tokens, N block slots, B block size, W window, C = W - 1 gathered context keys, S = C + B keys a
block, h query heads, g key/value heads, r = h / g, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trainer.model.block_tables import MaskLayout

GATHER_LIMIT = 128
"""Largest window that is gathered: every block gets its own copy of its keys, so a wide one costs memory instead."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Where each block's context keys lie, and which of its queries see them."""

    index_NC: torch.Tensor
    """int64, clamped into the row."""
    mask_NBS: torch.Tensor
    """bool; an unused slot sees its own block, so that no softmax row is empty (its output is zeroed)."""
    keep_N: torch.Tensor


def make_windows(anchors_N: torch.Tensor, keep_N: torch.Tensor, doc_ids_T: torch.Tensor, layout: MaskLayout) -> Windows:
    """The windows of one batch; a few small tensor operations, no host synchronisation."""
    assert layout.window is not None
    device, tokens = anchors_N.device, doc_ids_T.shape[0]
    anchor_N1 = anchors_N.long()[:, None]
    offset_B = torch.arange(layout.block_size, device=device)
    at_NC = anchor_N1 - torch.arange(layout.window - 1, 0, -1, device=device)
    index_NC = at_NC.clamp(0, tokens - 1)
    same_NC = doc_ids_T[index_NC] == doc_ids_T[anchor_N1.clamp(max=tokens - 1)]
    context_NC = (at_NC >= 0) & same_NC & keep_N[:, None]
    inside_NBC = at_NC[:, None, :] > (anchor_N1 + offset_B)[:, :, None] - layout.window
    block_BB = offset_B <= offset_B[:, None] if layout.causal else torch.ones_like(offset_B[:, None] + offset_B).bool()
    block_NBB = block_BB.expand(anchors_N.shape[0], -1, -1)
    return Windows(index_NC, torch.cat((context_NC[:, None, :] & inside_NBC, block_NBB), dim=2), keep_N)


def window_attention(
    q_hQD: torch.Tensor, k_gSD: torch.Tensor, v_gSD: torch.Tensor, windows: Windows, layout: MaskLayout
) -> torch.Tensor:
    """[h, Q, D], [g, T + Q, D] twice -> [h, Q, D]."""
    heads, _, size = q_hQD.shape
    groups, slots, block = k_gSD.shape[0], layout.slots, layout.block_size
    repeat = heads // groups

    def gather(x_gSD: torch.Tensor) -> torch.Tensor:
        context = x_gSD[:, windows.index_NC]
        own = x_gSD[:, layout.context :].view(groups, slots, block, size)
        return torch.cat((context, own), dim=2).transpose(0, 1)  # [N, g, C + B, D]

    # The r query heads of a group share their keys: they become further queries of that group.
    q_NgRD = q_hQD.view(groups, repeat, slots, block, size).permute(2, 0, 1, 3, 4).reshape(slots, groups, -1, size)
    mask_N1RS = windows.mask_NBS[:, None].repeat(1, 1, repeat, 1)
    out = F.scaled_dot_product_attention(q_NgRD, gather(k_gSD), gather(v_gSD), attn_mask=mask_N1RS)
    out = torch.where(windows.keep_N[:, None, None, None], out, 0.0)
    return out.view(slots, groups, repeat, block, size).permute(1, 2, 0, 3, 4).reshape(heads, -1, size)
