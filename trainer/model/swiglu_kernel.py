"""`swiglu.swiglu_backward` as a Triton kernel: every number is read once and written once.

Runs on CUDA, and under Triton's interpreter for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024


# Triton looks annotations up in the module as it compiles, and takes none but its own.
@triton.jit  # type: ignore[untyped-decorator]  # triton publishes no types
def _backward(  # type: ignore[no-untyped-def]
    gate_up, grad, to_gate_up, made, width: tl.constexpr, tiles: tl.constexpr, tile: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    column = (program % tiles) * tile + tl.arange(0, tile)
    inside = column < width
    wide = row * (2 * width) + column
    narrow = row * width + column
    gate = tl.load(gate_up + wide, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + wide + width, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + narrow, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    to_gate = slope * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(to_gate_up + wide, to_gate.to(to_gate_up.dtype.element_ty), mask=inside)
    tl.store(to_gate_up + wide + width, (slope * silu).to(to_gate_up.dtype.element_ty), mask=inside)
    tl.store(made + narrow, (silu * up).to(made.dtype.element_ty), mask=inside)


def launch(gate_up: torch.Tensor, grad: torch.Tensor, *, tile: int = TILE) -> tuple[torch.Tensor, torch.Tensor]:
    """See `swiglu.swiglu_backward`; both inputs contiguous."""
    rows, width = grad.shape
    to_gate_up, made = torch.empty_like(gate_up), torch.empty_like(grad)
    tiles = triton.cdiv(width, tile)
    _backward[(rows * tiles,)](gate_up, grad, to_gate_up, made, width=width, tiles=tiles, tile=tile, num_warps=4)
    return to_gate_up, made
