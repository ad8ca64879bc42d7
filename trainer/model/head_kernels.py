"""The row pass of the loss as one Triton kernel: two reads of a chunk's logits, one write.

One program takes one row. First it reads the row in tiles and keeps, lane by lane, the running maximum and the sum of
exponentials, rescaled whenever the maximum grows (Milakov and Gimelshein, arXiv 1805.02867); then it reads the row
again, looks where the maximum was and writes the gradient w * (softmax - onehot): over the logits, or as 8-bit values.

In 8 bits no pass is needed for the row's largest gradient: everything beside the label's own entry sums up to
w * (1 - p_label), which is also the label's magnitude, so that is the largest.

Runs on CUDA, and under Triton's interpreter for tests. `trainer.model.head` has the same in plain torch, against
which this is tested.

Shape legend: R rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trainer.model.fp8 import E4M3, SMALLEST_SCALE, Scaled

TILE = 4096
WARPS = 8
LARGEST_E4M3 = torch.finfo(E4M3).max
LOWEST = tl.constexpr(-1e30)
"""Where maxima start: minus infinity would give inf - inf."""


# Triton looks annotations up in the module as it compiles, and takes none but its own.
@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _row_pass(  # type: ignore[no-untyped-def]
    logits,
    labels,
    weights,
    tops,
    losses,
    values,
    scales,
    stride,
    values_stride,
    columns: tl.constexpr,
    smallest: tl.constexpr,
    largest: tl.constexpr,
    scaled: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    weight = tl.load(weights + row)
    within = tl.arange(0, tile)

    # Every lane keeps a maximum and a sum of its own: no lane waits for another before the end.
    best = tl.full((tile,), LOWEST, tl.float32)
    total = tl.zeros((tile,), tl.float32)
    for start in tl.range(0, columns, tile, loop_unroll_factor=2):
        x = tl.load(logits + start + within, mask=start + within < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(best, x)
        total = total * tl.exp(best - higher) + tl.exp(x - higher)
        best = higher
    peak = tl.max(best, axis=0)
    norm = tl.sum(total * tl.exp(best - peak), axis=0)
    gold = tl.load(logits + label).to(tl.float32)
    tl.store(losses + row, tl.log(norm) + peak - gold)

    scale = tl.full((), 1.0, tl.float32)
    if scaled:
        most = tl.abs(weight) * (1.0 - tl.exp(gold - peak) / norm)
        # A row that is not finite keeps a scale that is not either.
        scale = tl.where(most == most, tl.maximum(most / largest, smallest), most)
        tl.store(scales + row, scale)
    factor = weight / norm
    inverse = 1.0 / scale
    values += row * values_stride
    # The first of equals; a row that is not a number has none and keeps an index that exists.
    first = tl.full((tile,), columns - 1, tl.int32)
    for start in tl.range(0, columns, tile, loop_unroll_factor=2):
        at = start + within
        x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        first = tl.minimum(first, tl.where(x == peak, at, columns - 1))
        gradient = tl.exp(x - peak) * factor - tl.where(at == label, weight, 0.0)
        if scaled:
            gradient = tl.minimum(tl.maximum(gradient * inverse, -largest), largest)
        tl.store(values + at, gradient.to(values.dtype.element_ty), mask=at < columns)
    tl.store(tops + row, tl.min(first, axis=0).to(tl.int64))


def row_pass(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, weights_R: torch.Tensor, *, tile: int = TILE
) -> tuple[torch.Tensor, torch.Tensor]:
    """(top-1 int64 [R], CE fp32 [R]); d(sum w*CE)/d(logits) is left in `logits_RV`. See `head.RowPass`."""
    return _launch(logits_RV, labels_R, weights_R, logits_RV, None, tile)


def scaled_row_pass(
    logits_RV: torch.Tensor, labels_R: torch.Tensor, weights_R: torch.Tensor, *, tile: int = TILE
) -> tuple[torch.Tensor, torch.Tensor, Scaled]:
    """The same with the gradient as 8-bit rows; `logits_RV` stay as they are. See `head.ScaledRowPass`."""
    rows, columns = logits_RV.shape
    values_RV = torch.empty(rows, columns, dtype=E4M3, device=logits_RV.device)
    scale_R1 = torch.empty(rows, 1, dtype=torch.float32, device=logits_RV.device)
    top_R, losses_R = _launch(logits_RV, labels_R, weights_R, values_RV, scale_R1, tile)
    return top_R, losses_R, Scaled(values_RV, scale_R1)


def _launch(
    logits_RV: torch.Tensor,
    labels_R: torch.Tensor,
    weights_R: torch.Tensor,
    values_RV: torch.Tensor,
    scale_R1: torch.Tensor | None,
    tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits_RV.shape
    top_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    losses_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    _row_pass[(rows,)](
        logits_RV,
        labels_R,
        weights_R,
        top_R,
        losses_R,
        values_RV,
        losses_R if scale_R1 is None else scale_R1,
        logits_RV.stride(0),
        values_RV.stride(0),
        columns=columns,
        smallest=SMALLEST_SCALE,
        largest=LARGEST_E4M3,
        scaled=scale_R1 is not None,
        tile=tile,
        num_warps=WARPS,
    )
    return top_R, losses_R
