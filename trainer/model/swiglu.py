"""down(silu(gate) * up) with a backward of its own: one elementwise pass, and nothing kept beside gate and up.

Autograd would keep the wide product for the gradient of `down`, or make it again in a pass of its own, and write both
halves' gradients through a concatenation that reads everything twice. Here one pass over (gate, up, gradient of the
product) gives all three: the gradients of both halves, side by side, and the product.

Shape legend: R rows, F intermediate size, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.model import fp8


@torch.library.custom_op("dflash::swiglu_backward", mutates_args=())
def swiglu_backward(gate_up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of [gate | up] [R, 2F], silu(gate) * up [R, F]) from [gate | up] [R, 2F] and a gradient [R, F].

    Arithmetic in fp32, results in the inputs' type. d silu(g)/dg = s (1 + g (1 - s)) with s = sigmoid(g).
    """
    gate, up = (half.float() for half in gate_up.chunk(2, dim=1))
    sigmoid, slope = gate.sigmoid(), grad.float()
    to_gate = slope * up * sigmoid * (1 + gate * (1 - sigmoid))
    to_up = slope * gate * sigmoid
    return torch.cat((to_gate, to_up), dim=1).to(gate_up.dtype), (gate * sigmoid * up).to(gate_up.dtype)


@swiglu_backward.register_fake
def _(gate_up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(gate_up), torch.empty_like(grad)


@swiglu_backward.register_kernel("cuda")
def _(gate_up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from trainer.model.swiglu_kernel import launch  # Triton is there only where a GPU is

    return launch(gate_up.contiguous(), grad.contiguous())


class _SwiGLUDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, down: torch.Tensor, in_8_bits: bool) -> torch.Tensor:
        ctx.save_for_backward(gate_up, down)
        ctx.in_8_bits = in_8_bits
        gate, up = gate_up.chunk(2, dim=1)
        made = torch.nn.functional.silu(gate) * up
        return fp8.product(made, down) if in_8_bits else torch.nn.functional.linear(made, down)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = gradients
        gate_up, down = ctx.saved_tensors
        slope = fp8.product_to_input(grad, down) if ctx.in_8_bits else grad @ down
        to_gate_up, made = swiglu_backward(gate_up, slope)
        to_down = fp8.product_to_weight(grad, made) if ctx.in_8_bits else grad.t() @ made
        return to_gate_up, to_down, None


def swiglu_down(gate_up: torch.Tensor, down: torch.Tensor, *, in_8_bits: bool = False) -> torch.Tensor:
    """[R, 2F] = [gate | up] and the weight [H, F] -> [R, H], its products plain or as `fp8.linear`'s."""
    out: torch.Tensor = _SwiGLUDown.apply(gate_up, down, in_8_bits)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return out
