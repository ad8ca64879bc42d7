"""Decayed cross-entropy through the frozen head, in chunks, without keeping or recomputing the logits.

The head has no gradient, so the only thing the backward pass needs is d(loss)/d(hidden). Each chunk of
rows computes its logits once, turns them into the gradient in place, multiplies them back through the head
at once, and is forgotten: two matrix products a chunk and chunk_rows * V logits alive at any time.

The sum is a numerator; its denominator (the sum of weights) is global over drafters and micro-steps, so
the division belongs to the step. Everything stays on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class LossSums(NamedTuple):
    """Sums over one micro-batch; tensors on the device, never read here."""

    numerator: torch.Tensor
    """fp32 scalar, sum of w * CE; the differentiable one."""
    denominator: torch.Tensor
    """fp32 scalar, sum of w."""
    correct: torch.Tensor
    """fp32 scalar, weighted positions (w > 0) whose top-1 token is the label."""
    counted: torch.Tensor
    """fp32 scalar, weighted positions."""
    hits_Q: torch.Tensor
    """bool [Q], weighted and right; feeds `accept_lengths`."""


class _HeadCrossEntropy(torch.autograd.Function):
    """(sum w*CE, top-1 [Q], CE [Q]); the gradient of the sum is ready when the forward returns."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_QH: torch.Tensor,
        head_VH: torch.Tensor,
        labels_Q: torch.Tensor,
        weights_Q: torch.Tensor,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = torch.zeros((), dtype=torch.float32, device=hidden_QH.device)
        gradient_QH = torch.empty_like(hidden_QH)
        top_Q = torch.empty_like(labels_Q)
        losses_Q = torch.empty_like(weights_Q)
        for start in range(0, hidden_QH.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            label, weight = labels_Q[rows], weights_Q[rows]
            logits = hidden_QH[rows] @ head_VH.T
            top_Q[rows] = logits.argmax(-1)
            # logsumexp of bf16 logits must be summed in fp32; done by hand, the fp32 copy would double the peak.
            peak = logits.amax(-1, keepdim=True)
            gold = logits.gather(-1, label[:, None])
            shifted = logits.sub_(peak)
            denominator = torch.sum(shifted.exp(), dim=-1, keepdim=True, dtype=torch.float32)
            losses_Q[rows] = (denominator.log() - (gold - peak).float()).squeeze(-1)
            total += (losses_Q[rows] * weight).sum()
            # d(w*CE)/d(logits) = w * (softmax - onehot), written over the logits.
            scale = (weight[:, None] / denominator).to(logits.dtype)
            dlogits = shifted.exp_().mul_(scale)
            dlogits.scatter_add_(-1, label[:, None], -weight[:, None].to(logits.dtype))
            torch.mm(dlogits, head_VH, out=gradient_QH[rows])
        ctx.save_for_backward(gradient_QH)
        ctx.mark_non_differentiable(top_Q, losses_Q)
        return total, top_Q, losses_Q

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_QH,) = ctx.saved_tensors
        return gradient_QH * outputs[0].to(gradient_QH.dtype), None, None, None, None


def block_loss(
    hidden_QH: torch.Tensor,
    head_VH: torch.Tensor,
    labels_Q: torch.Tensor,
    weights_Q: torch.Tensor,
    chunk_rows: int,
) -> LossSums:
    """Sums of the decayed cross-entropy. hidden [Q,H] and head [V,H] of one type, labels int64, weights fp32.

    `numerator` carries the gradient to `hidden_QH`; the head gets none.
    """
    apply: Any = _HeadCrossEntropy.apply  # torch leaves it unannotated
    numerator, top_Q, _ = apply(hidden_QH, head_VH, labels_Q, weights_Q, chunk_rows)
    return _sums(numerator, top_Q, labels_Q, weights_Q)


def reference_block_loss(
    hidden_QH: torch.Tensor, head_VH: torch.Tensor, labels_Q: torch.Tensor, weights_Q: torch.Tensor
) -> LossSums:
    """The same sums, plainly, in fp32 with all logits at once: what `block_loss` is tested against."""
    logits_QV = hidden_QH.float() @ head_VH.float().T
    losses_Q = torch.nn.functional.cross_entropy(logits_QV, labels_Q, reduction="none")
    return _sums((losses_Q * weights_Q).sum(), logits_QV.argmax(-1), labels_Q, weights_Q)


def _sums(numerator: torch.Tensor, top_Q: torch.Tensor, labels_Q: torch.Tensor, weights_Q: torch.Tensor) -> LossSums:
    counted_Q = weights_Q > 0
    hits_Q = (top_Q == labels_Q) & counted_Q
    return LossSums(numerator, weights_Q.sum(), hits_Q.sum().float(), counted_Q.sum().float(), hits_Q)


def accept_lengths(hits_Q: torch.Tensor, weights_Q: torch.Tensor, block_size: int) -> torch.Tensor:
    """Teacher-forced acceptance length of each block, fp32 [N]: 1 (the bonus token) + the leading run of hits.

    The run ends at the first miss or the first position without a label. Blocks with no label give 1; leave
    them out by `weights.any`.
    """
    hits_NB = hits_Q.view(-1, block_size)[:, 1:]
    counted_NB = (weights_Q > 0).view(-1, block_size)[:, 1:]
    run = (hits_NB & counted_NB).long().cumprod(dim=1)
    return 1.0 + run.sum(dim=1).float()
