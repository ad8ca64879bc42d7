"""Decayed cross-entropy through the frozen head, in chunks, without keeping or recomputing the logits.

The head has no gradient, so the only thing the backward pass needs is d(loss)/d(hidden). Each chunk of
rows computes its logits once, turns them into the gradient in place, multiplies them back through the head
at once, and is forgotten: two matrix products a chunk and chunk_rows * V logits alive at any time.

Options: D-PACE weights (arXiv 2605.18810) instead of the fixed decay; the target's own choice as label; the
target's distribution as label (KL), computed chunk by chunk from its final states at the rows that are asked.

The sum is a numerator; its denominator (the sum of weights) is global over drafters and micro-steps, so
the division belongs to the step. Everything stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trainer.model.head import Head, PlainHead


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


class Teacher(NamedTuple):
    """The target's final-normed states [T, H], and for each block position the row that predicts it."""

    final_TH: torch.Tensor
    source_Q: torch.Tensor
    """int64 [Q]: anchor + k - 1."""
    head_VH: torch.Tensor
    """Turns those states into the target's own logits; never quantised."""


Reweigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(CE [Q], weights [Q]) -> new weights [Q]; see `dpace`."""


def dpace_weights(losses_R: torch.Tensor, weights_R: torch.Tensor, drafted: int, smoothing: float) -> torch.Tensor:
    """D-PACE: w_j = sum over m >= j of prod over i <= m of q_i, q = (1 - a) exp(-CE) + a, detached (arXiv 2605.18810).

    Rows are the `drafted` = block_size - 1 places of each block, the anchor's left out. The weight is the expected
    acceptance length's derivative in log q_j: a place weighs what depends on it. Nothing after the first place
    without a label can be accepted, so the weight there and later is zero.
    """
    q_ND = ((1.0 - smoothing) * torch.exp(-losses_R.detach()) + smoothing).view(-1, drafted)
    reached_ND = (q_ND * (weights_R > 0).view(-1, drafted)).cumprod(dim=1)
    return (reached_ND.flip(1).cumsum(dim=1).flip(1) * (reached_ND > 0)).flatten()


def dpace(drafted: int, smoothing: float) -> Reweigh:
    """`block_loss`'s `reweigh` for D-PACE."""
    return lambda losses_R, weights_R: dpace_weights(losses_R, weights_R, drafted, smoothing)


@torch.no_grad()
def teacher_choices(final_TH: torch.Tensor, head_VH: torch.Tensor, chunk_rows: int) -> torch.Tensor:
    """The target's most likely token AT each place, int64 [T]: row t of its head speaks for place t + 1.

    Place 0 of the row is never a label (a label follows its anchor) and holds 0. With these for `input_ids` when
    labels are gathered, a block is asked for what the target would say instead of what the text says.
    """
    chunks = (final_TH[start : start + chunk_rows] for start in range(0, final_TH.shape[0], chunk_rows))
    best = [(rows @ head_VH.T).argmax(-1) for rows in chunks]
    return torch.nn.functional.pad(torch.cat(best)[:-1], (1, 0))


class _HeadCrossEntropy(torch.autograd.Function):
    """(sum w*CE, top-1 [Q], w [Q]); the gradient of the sum is ready when the forward returns."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_QH: torch.Tensor,
        head: Head,
        labels_Q: torch.Tensor,
        weights_Q: torch.Tensor,
        chunk_rows: int,
        teacher: Teacher | None,
        reweigh: Reweigh | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient_QH = torch.empty_like(hidden_QH)
        top_Q = torch.empty_like(labels_Q)
        losses_Q = torch.empty_like(weights_Q)
        for start in range(0, hidden_QH.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            said = None if teacher is None else teacher.final_TH[teacher.source_Q[rows]] @ teacher.head_VH.T
            found = head.losses(hidden_QH[rows], labels_Q[rows], weights_Q[rows], said, gradient_QH[rows])
            top_Q[rows], losses_Q[rows] = found
        if reweigh is not None:
            # The gradient is linear in each row's weight, so it can be weighed once the losses are known.
            fresh_Q = reweigh(losses_Q, weights_Q)
            ratio_Q = torch.where(weights_Q > 0, fresh_Q / weights_Q.clamp(min=1e-30), torch.zeros_like(fresh_Q))
            gradient_QH.mul_(ratio_Q[:, None].to(gradient_QH.dtype))
            weights_Q = fresh_Q
        total = (losses_Q * weights_Q).sum()
        ctx.save_for_backward(gradient_QH)
        used_Q = weights_Q.clone()  # an input must not be returned as it is
        ctx.mark_non_differentiable(top_Q, used_Q)
        return total, top_Q, used_Q

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_QH,) = ctx.saved_tensors
        return gradient_QH * outputs[0].to(gradient_QH.dtype), *(None,) * 6


def block_loss(
    hidden_QH: torch.Tensor,
    head: torch.Tensor | Head,
    labels_Q: torch.Tensor,
    weights_Q: torch.Tensor,
    chunk_rows: int,
    *,
    teacher: Teacher | None = None,
    reweigh: Reweigh | None = None,
) -> LossSums:
    """Sums of the weighted cross-entropy. hidden [Q,H] and head [V,H] of one type, labels int64, weights fp32.

    `numerator` carries the gradient to `hidden_QH`; the head gets none. `head` is the matrix itself or one of
    `trainer.model.head`. With a `teacher` the loss is KL(target || drafter) and labels serve the hit counts alone.
    `reweigh` replaces the weights by ones that depend on the losses (`dpace`).
    """
    apply: Any = _HeadCrossEntropy.apply  # torch leaves it unannotated
    kept = PlainHead(head) if isinstance(head, torch.Tensor) else head
    numerator, top_Q, used_Q = apply(hidden_QH, kept, labels_Q, weights_Q, chunk_rows, teacher, reweigh)
    return _sums(numerator, top_Q, labels_Q, weights_Q, used_Q)


def reference_block_loss(
    hidden_QH: torch.Tensor,
    head_VH: torch.Tensor,
    labels_Q: torch.Tensor,
    weights_Q: torch.Tensor,
    *,
    teacher: Teacher | None = None,
    reweigh: Reweigh | None = None,
) -> LossSums:
    """The same sums, plainly, in fp32 with all logits at once: what `block_loss` is tested against."""
    logits_QV = hidden_QH.float() @ head_VH.float().T
    if teacher is None:
        losses_Q = torch.nn.functional.cross_entropy(logits_QV, labels_Q, reduction="none")
    else:
        said_QV = teacher.final_TH[teacher.source_Q].float() @ teacher.head_VH.float().T
        losses_Q = torch.nn.functional.kl_div(
            logits_QV.log_softmax(-1), said_QV.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
    used_Q = weights_Q if reweigh is None else reweigh(losses_Q.detach(), weights_Q)
    return _sums((losses_Q * used_Q).sum(), logits_QV.argmax(-1), labels_Q, weights_Q, used_Q)


def _sums(
    numerator: torch.Tensor,
    top_Q: torch.Tensor,
    labels_Q: torch.Tensor,
    weights_Q: torch.Tensor,
    used_Q: torch.Tensor,
) -> LossSums:
    counted_Q = weights_Q > 0
    hits_Q = (top_Q == labels_Q) & counted_Q
    return LossSums(numerator, used_Q.sum(), hits_Q.sum().float(), counted_Q.sum().float(), hits_Q)


def accept_lengths(hits_Q: torch.Tensor, weights_Q: torch.Tensor, block_size: int) -> torch.Tensor:
    """Teacher-forced acceptance length of each block, fp32 [N]: 1 (the bonus token) + the leading run of hits.

    The run ends at the first miss or the first position without a label. Blocks with no label give 1; leave
    them out by `weights.any`.
    """
    hits_NB = hits_Q.view(-1, block_size)[:, 1:]
    counted_NB = (weights_Q > 0).view(-1, block_size)[:, 1:]
    run = (hits_NB & counted_NB).long().cumprod(dim=1)
    return 1.0 + run.sum(dim=1).float()
