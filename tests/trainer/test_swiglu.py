"""The MLP's own backward against autograd's."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from trainer.model.swiglu import swiglu_down


def case(rows: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * width)
    sizes = (rows, 2 * width), (7, width), (rows, 7), (rows, width)
    return tuple(torch.randn(*size, generator=generator).to(dtype) for size in sizes)


def test_output_and_both_gradients_are_autograds() -> None:
    """Failed with gate and up exchanged, and without the product of d silu."""
    gate_up, down, slope, _ = case(5, 12)
    found = []
    for own in (False, True):
        x, w = gate_up.clone().requires_grad_(), down.clone().requires_grad_()
        gate, up = x.chunk(2, dim=1)
        out = swiglu_down(x, w) if own else F.linear(F.silu(gate) * up, w)
        out.backward(slope)
        found.append((out.detach(), x.grad, w.grad))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want)


def test_it_keeps_what_it_is_given_and_nothing_else() -> None:
    gate_up, down, slope, _ = case(5, 12)
    x, w = gate_up.requires_grad_(), down.requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = swiglu_down(x, w)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), w.data_ptr()}
    out.backward(slope)


def test_it_traces_whole_with_the_same_gradients() -> None:
    gate_up, down, slope, _ = case(5, 12)
    found = []
    for call in (swiglu_down, torch.compile(swiglu_down, fullgraph=True, backend="aot_eager")):
        x, w = gate_up.clone().requires_grad_(), down.clone().requires_grad_()
        call(x, w).backward(slope)
        found.append((x.grad, w.grad))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want)
