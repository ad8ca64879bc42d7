"""Matrix products in 8-bit floating point: rows quantised to e4m3, one fp32 scale for each row.

The product is `torch._scaled_mm`, which exists on CUDA (compute capability 8.9, 9.0 and newer) and on CPUs, where it
computes the same numbers slowly. Both operands are stored with the summed dimension innermost, as Hopper's 8-bit tensor
cores want it: `a` row-major, `b` handed over as the transpose of a row-major matrix.

What CUDA refuses is refused here on every device, so that a CPU run proves the shapes: the summed dimension and the
number of `b`'s rows must be multiples of 16; the rows of `a` are free. On CUDA the output is bf16: fp32 outputs of
row-wise products came later than torch 2.11.

Shape legend: M rows of a, N rows of b (columns of the product), K summed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trainer.config import FP8_MULTIPLE

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
SMALLEST_SCALE = 2.0**-100
"""Keeps the scale of a row of zeros from being zero; rows below 1e-27 lose precision, which nothing notices."""


class Scaled(NamedTuple):
    """A matrix [R, C] as 8-bit values and a factor for each row: `values * scale` is what it stands for."""

    values: torch.Tensor
    """float8 [R, C], row-major."""
    scale: torch.Tensor
    """fp32 [R, 1]."""


def quantise_rows(x_RC: torch.Tensor, dtype: torch.dtype = E4M3) -> Scaled:
    """Each row divided by its largest magnitude over the format's largest number, then rounded.

    A row of zeros stays zero. A row that holds an infinity or a NaN gets a scale that is one, so that every product
    with it is non-finite: the conversion itself saturates and would hide it. Give `x.t()` to quantise the columns;
    the result is row-major all the same. No host synchronisation; elementwise except for the maximum, so it fuses.
    """
    wide_RC = x_RC.float()
    scale_R1 = (wide_RC.abs().amax(dim=1, keepdim=True) / torch.finfo(dtype).max).clamp(min=SMALLEST_SCALE)
    return Scaled((wide_RC / scale_R1).to(dtype).contiguous(), scale_R1.contiguous())


def dequantise(scaled: Scaled) -> torch.Tensor:
    """The matrix it stands for, fp32 [R, C]."""
    return scaled.values.float() * scaled.scale


def check_product(inner: int, columns: int) -> None:
    """Raises ValueError for a product that CUDA's `_scaled_mm` refuses: K and N must be multiples of 16."""
    for name, size in (("summed dimension", inner), ("number of output columns", columns)):
        if size % FP8_MULTIPLE:
            raise ValueError(
                f"an 8-bit product needs its {name} ({size}) to be a multiple of {FP8_MULTIPLE}; leave fp8 off here"
            )


def scaled_matmul(a: Scaled, b: Scaled, out_dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
    """a [M, K] times the transpose of b [N, K] -> [M, N] in `out_dtype`, scales applied after the sum.

    `fast` lets Hopper keep the whole sum in its tensor cores' shorter registers: for short sums. At most one operand
    may be e5m2. Raises ValueError for shapes and output types that CUDA refuses.
    """
    check_product(a.values.shape[1], b.values.shape[0])
    if a.values.is_cuda and out_dtype != torch.bfloat16:
        raise ValueError(f"an 8-bit product on CUDA gives bfloat16, not {out_dtype}; set target.dtype=bfloat16")
    # b.scale is [N, 1] and contiguous, so its transpose [1, N] is contiguous as well, as the kernel demands.
    scale_b = b.scale.view(1, -1)
    return torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.scale, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=fast
    )


def reference_scaled_matmul(a: Scaled, b: Scaled) -> torch.Tensor:
    """The same product in fp32, plainly: what `scaled_matmul` is tested against."""
    return dequantise(a) @ dequantise(b).T


def product(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """`linear`'s output, without a backward."""
    return scaled_matmul(quantise_rows(x_MK), quantise_rows(w_NK), x_MK.dtype, fast=True)


# Each product sums over another dimension, and rows are quantised along the summed one: six quantisations.
def product_to_input(gradient_MN: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """`linear`'s gradient to its input."""
    return scaled_matmul(quantise_rows(gradient_MN), quantise_rows(w_NK.t()), gradient_MN.dtype)


def product_to_weight(gradient_MN: torch.Tensor, x_MK: torch.Tensor) -> torch.Tensor:
    """`linear`'s gradient to its weight."""
    return scaled_matmul(quantise_rows(gradient_MN.t()), quantise_rows(x_MK.t()), gradient_MN.dtype)


class _ScaledLinear(torch.autograd.Function):
    """x [M, K] times the transpose of w [N, K], with all three products of forward and backward in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        return product(x_MK, w_NK)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        (gradient_MN,) = gradients
        x_MK, w_NK = ctx.saved_tensors
        to_x = product_to_input(gradient_MN, w_NK) if ctx.needs_input_grad[0] else None
        to_w = product_to_weight(gradient_MN, x_MK) if ctx.needs_input_grad[1] else None
        return to_x, to_w


def linear(x_MK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.linear` without a bias, in 8 bits: output [M, N], input gradient and weight gradient.

    e4m3 for gradients too: one scale a row leaves no need for e5m2's range, and its rounding is twice as coarse
    (docs/benchmarks.md). M, N and K must be multiples of 16 (M is summed over in the weight gradient).
    """
    check_product(x_MK.shape[0], w_NK.shape[0])
    out: torch.Tensor = _ScaledLinear.apply(x_MK, w_NK)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return out
