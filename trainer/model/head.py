"""The target's frozen head as the loss uses it: logits of a chunk of rows, and their gradient sent back at once.

Two forms: as it is, and in 8 bits. The head has no gradient of its own, so both are two matrix products a chunk with
one pass over the logits between them.

Shape legend: R rows of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from trainer.config import FP8_MULTIPLE
from trainer.model.fp8 import E4M3, Scaled, quantise_rows, scaled_matmul

RowPass = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(logits [R,V], labels [R], weights [R]) -> (top-1 [R], CE fp32 [R]); d(sum w*CE)/d(logits) is left in `logits`."""

ScaledRowPass = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, Scaled]]
"""The same, with the gradient as 8-bit rows [R,V]; `logits` stay as they are."""


PART = 1 << 26
"""Numbers of a head that are quantised at once."""


class Head(Protocol):
    """What `block_loss` asks of a head."""

    def losses(
        self,
        hidden_RH: torch.Tensor,
        labels_R: torch.Tensor,
        weights_R: torch.Tensor,
        said_RV: torch.Tensor | None,
        gradient_RH: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(top-1 [R], losses fp32 [R]); d(sum w * loss)/d(hidden) is written into `gradient_RH`.

        The loss is cross-entropy, or KL against the logits `said_RV` where they are given.
        """


@dataclass(frozen=True, slots=True)
class PlainHead:
    """The head in the drafter's own type."""

    head_VH: torch.Tensor
    row_pass: RowPass | None = None
    """`head_kernels.row_pass`; None: `gradient_over_logits`."""

    def losses(
        self,
        hidden_RH: torch.Tensor,
        labels_R: torch.Tensor,
        weights_R: torch.Tensor,
        said_RV: torch.Tensor | None,
        gradient_RH: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head`."""
        logits_RV = hidden_RH @ self.head_VH.T
        if said_RV is None:
            found = (self.row_pass or gradient_over_logits)(logits_RV, labels_R, weights_R)
        else:
            found = soft_gradient_over_logits(logits_RV, said_RV, labels_R, weights_R)
        torch.mm(logits_RV, self.head_VH, out=gradient_RH)
        return found


@dataclass(frozen=True, slots=True)
class ScaledHead:
    """The head in 8 bits, quantised once: by rows for the logits, by columns for the way back.

    The vocabulary is padded with rows of zeros to what the product wants; nothing of the padding leaves this class.
    """

    rows: Scaled
    """[V, H], one scale for each token."""
    columns: Scaled
    """[H, V], one scale for each channel."""
    vocab_size: int
    row_pass: ScaledRowPass | None = None
    """`head_kernels.scaled_row_pass`; None: `scaled_gradient_of_logits`."""
    quantise: Callable[[torch.Tensor], Scaled] = quantise_rows
    """`quantise_rows`, or the same compiled."""

    @classmethod
    def of(
        cls,
        head_VH: torch.Tensor,
        row_pass: ScaledRowPass | None = None,
        quantise: Callable[[torch.Tensor], Scaled] = quantise_rows,
    ) -> ScaledHead:
        """Quantise a head; the original is not kept."""
        vocab_size = head_VH.shape[0]
        if vocab_size % FP8_MULTIPLE:
            head_VH = torch.nn.functional.pad(head_VH, (0, 0, 0, -vocab_size % FP8_MULTIPLE))
        return cls(_in_parts(head_VH), _in_parts(head_VH.t()), vocab_size, row_pass, quantise)

    def losses(
        self,
        hidden_RH: torch.Tensor,
        labels_R: torch.Tensor,
        weights_R: torch.Tensor,
        said_RV: torch.Tensor | None,
        gradient_RH: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head`."""
        logits_RV = scaled_matmul(self.quantise(hidden_RH), self.rows, hidden_RH.dtype, fast=True)
        logits_RV = logits_RV[:, : self.vocab_size]
        if said_RV is None:
            top_R, losses_R, scaled = (self.row_pass or scaled_gradient_of_logits)(logits_RV, labels_R, weights_R)
        else:
            top_R, losses_R = soft_gradient_over_logits(logits_RV, said_RV, labels_R, weights_R)
            scaled = self.quantise(logits_RV)
        if self.vocab_size % FP8_MULTIPLE:
            padded_RV = torch.nn.functional.pad(scaled.values, (0, -self.vocab_size % FP8_MULTIPLE))
            scaled = Scaled(padded_RV, scaled.scale)
        gradient_RH.copy_(scaled_matmul(scaled, self.columns, hidden_RH.dtype))
        return top_R, losses_R


def _in_parts(x_RC: torch.Tensor) -> Scaled:
    """`quantise_rows`, some rows at a time: uncompiled and whole, a head of 248,320 x 5,120 would take 15 GB."""
    parts = Scaled(
        torch.empty(x_RC.shape, dtype=E4M3, device=x_RC.device),
        torch.empty(x_RC.shape[0], 1, dtype=torch.float32, device=x_RC.device),
    )
    step = max(1, PART // x_RC.shape[1])
    for low in range(0, x_RC.shape[0], step):
        part = quantise_rows(x_RC[low : low + step])
        parts.values[low : low + step] = part.values
        parts.scale[low : low + step] = part.scale
    return parts


def gradient_over_logits(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, weights_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The row pass as it runs uncompiled: everything R * V large stays in the logits' own type and mostly in place."""
    top_R = logits_RV.argmax(-1)
    # logsumexp of bf16 logits must be summed in fp32; done by hand, the fp32 copy would double the peak.
    peak_R1 = logits_RV.amax(-1, keepdim=True)
    gold_R1 = logits_RV.gather(-1, labels_R[:, None])
    shifted_RV = logits_RV.sub_(peak_R1)
    total_R1 = torch.sum(shifted_RV.exp(), dim=-1, keepdim=True, dtype=torch.float32)
    losses_R = (total_R1.log() - (gold_R1 - peak_R1).float()).squeeze(-1)
    # d(w*CE)/d(logits) = w * (softmax - onehot), written over the logits.
    shifted_RV.exp_().mul_((weights_R[:, None] / total_R1).to(logits_RV.dtype))
    shifted_RV.scatter_add_(-1, labels_R[:, None], -weights_R[:, None].to(logits_RV.dtype))
    return top_R, losses_R


def scaled_gradient_of_logits(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, weights_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Scaled]:
    """The row pass of an 8-bit head as it runs without the kernel.

    e4m3 rather than e5m2, although a row spans from the label's -w down to a millionth of it: over a vocabulary of
    248,320 its error is the smaller one unless the softmax is nearly flat, and there both are far below the head's own
    (docs/benchmarks.md).
    """
    gradient_RV = logits_RV.to(torch.float32, copy=True)
    top_R, losses_R = gradient_over_logits(gradient_RV, labels_R, weights_R)
    return top_R, losses_R, quantise_rows(gradient_RV)


def soft_gradient_over_logits(
    logits_RV: torch.Tensor, teacher_RV: torch.Tensor, labels_R: torch.Tensor, weights_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row pass against the target's distribution p: (top-1, KL(p || q)); w * (q - p) is left in `logits_RV`."""
    top_R = logits_RV.argmax(-1)
    log_q_RV, log_p_RV = logits_RV.float().log_softmax(-1), teacher_RV.float().log_softmax(-1)
    p_RV = log_p_RV.exp()
    losses_R = (p_RV * (log_p_RV - log_q_RV)).sum(-1)
    logits_RV.copy_((log_q_RV.exp_() - p_RV) * weights_R[:, None])
    return top_R, losses_R
