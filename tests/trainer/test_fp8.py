"""8-bit products against fp32 ones: the kernel against its naive twin, and the twin against the unquantised product."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.model.fp8 import (
    E4M3,
    E5M2,
    SMALLEST_SCALE,
    dequantise,
    linear,
    quantise_rows,
    reference_scaled_matmul,
    scaled_matmul,
)
from trainer.torch_setup import apply_torch_config


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values whose rows differ in size by factors of up to a thousand, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.empty(shape[0], 1).uniform_(-1.5, 1.5, generator=generator)
    return torch.randn(shape, generator=generator) * scale


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


class TestQuantiseRows:
    @settings(max_examples=30, deadline=None)
    @given(
        rows=st.integers(1, 9),
        columns=st.integers(1, 40),
        seed=st.integers(0, 99),
        exponent=st.integers(-20, 30),
        dtype=st.sampled_from([E4M3, E5M2]),
    )
    def test_every_value_is_within_half_a_step_of_the_format(
        self, rows: int, columns: int, seed: int, exponent: int, dtype: torch.dtype
    ) -> None:
        """e4m3 has 3 bits after the leading one, e5m2 two: half a step is 2^-4 or 2^-3 of the value; below the smallest
        normal number the step is fixed. Fails if the values are divided by 1.1 times the scale that is handed back.
        """
        x = random(rows, columns, seed=seed) * 2.0**exponent
        scaled = quantise_rows(x, dtype)
        info = torch.finfo(dtype)
        assert scaled.values.dtype == dtype
        assert scaled.scale.shape == (rows, 1)
        step = torch.maximum(x.abs() * info.eps / 2, scaled.scale * info.smallest_normal * info.eps / 2)
        assert ((dequantise(scaled) - x).abs() <= step * 1.001).all()

    def test_the_largest_value_of_a_row_survives(self) -> None:
        """It maps to the format's largest number; fails with one scale for all rows, or one that divides by 256."""
        x = random(8, 64)
        peak = quantise_rows(x).values.float().abs().amax(1)
        assert torch.equal(peak, torch.full((8,), 448.0))

    def test_a_row_of_zeros_stays_zero(self) -> None:
        """Fails (NaN) without the smallest scale."""
        scaled = quantise_rows(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
        assert dequantise(scaled).tolist() == [[0.0, 0.0], [1.0, -2.0]]
        assert float(scaled.scale[0]) == SMALLEST_SCALE

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_what_is_not_finite_stays_visible_in_every_product_of_its_row(self, bad: float) -> None:
        """torch's conversion to e4m3 turns an infinity into 448; fails if the scale is made finite."""
        x = random(4, 32)
        x[2, 5] = bad
        w = random(16, 32, seed=1)
        out = scaled_matmul(quantise_rows(x), quantise_rows(w), torch.float32)
        finite = torch.isfinite(out)
        assert not finite[2].any()
        assert finite[[0, 1, 3]].all()
        out = scaled_matmul(quantise_rows(w), quantise_rows(torch.cat([x] * 4)), torch.float32)
        assert not torch.isfinite(out[:, 2]).any()

    def test_a_transposed_view_gives_a_row_major_matrix(self) -> None:
        """Hopper takes operands with the summed dimension innermost only."""
        x = random(48, 32)
        scaled = quantise_rows(x.t())
        assert scaled.values.shape == (32, 48)
        assert scaled.values.is_contiguous()
        assert torch.equal(dequantise(scaled), dequantise(quantise_rows(x.t().contiguous())))


class TestScaledMatmul:
    @pytest.mark.parametrize(("rows", "inner", "columns"), [(64, 128, 96), (5, 16, 16), (1, 256, 32), (33, 48, 128)])
    @pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
    def test_it_is_the_product_of_what_the_operands_stand_for(
        self, rows: int, inner: int, columns: int, types: tuple[torch.dtype, torch.dtype]
    ) -> None:
        """Fails if the columns' scales are applied in reverse order."""
        a = quantise_rows(random(rows, inner), types[0])
        b = quantise_rows(random(columns, inner, seed=1), types[1])
        want = reference_scaled_matmul(a, b)
        assert relative(scaled_matmul(a, b, torch.float32), want) < 1e-5
        assert relative(scaled_matmul(a, b, torch.bfloat16), want) < 2**-8

    def test_the_error_against_the_unquantised_product(self) -> None:
        """Each operand carries the rounding of e4m3, 2.6 % root mean square; two independent ones give 3.7 %."""
        a, b = random(256, 512), random(128, 512, seed=1)
        got = scaled_matmul(quantise_rows(a), quantise_rows(b), torch.float32)
        assert 0.02 < relative(got, a @ b.T) < 0.045

    def test_rows_keep_their_own_precision(self) -> None:
        """A row a billion times smaller than the next is as exact as it; fails with one scale for all."""
        a = random(64, 256) * torch.logspace(-5, 4, 64)[:, None]
        b = torch.randn(96, 256, generator=torch.Generator().manual_seed(1))
        got, want = scaled_matmul(quantise_rows(a), quantise_rows(b), torch.float32), a @ b.T
        errors = (got - want).norm(dim=1) / want.norm(dim=1)
        assert float(errors.max()) < 0.06

    @pytest.mark.parametrize(("inner", "columns", "said"), [(24, 16, "summed"), (32, 7, "columns")])
    def test_shapes_that_cuda_refuses_are_refused_everywhere(self, inner: int, columns: int, said: str) -> None:
        """The CPU kernel would take them."""
        a, b = quantise_rows(random(4, inner)), quantise_rows(random(columns, inner))
        with pytest.raises(ValueError, match=f"{said}.*multiple of 16"):
            scaled_matmul(a, b, torch.float32)

    def test_it_compiles_as_a_whole(self) -> None:
        """Quantisation and product in one graph, equal to the uncompiled result to rounding."""

        def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return scaled_matmul(quantise_rows(a), quantise_rows(b), torch.float32)

        a, b = random(32, 64), random(16, 64, seed=1)
        compiled = torch.compile(product, fullgraph=True, dynamic=False)
        assert relative(compiled(a, b), product(a, b)) < 0.01


class TestLinear:
    """Forward, input gradient and weight gradient, each a product of two operands rounded to e4m3: 3.7 % each."""

    def case(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, w, g = (random(*shape, seed=i) for i, shape in enumerate([(64, 48), (32, 48), (64, 32)]))
        return x.to(dtype).requires_grad_(), (w / w.norm()).to(dtype).requires_grad_(), g.to(dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_output_and_both_gradients_are_those_of_a_plain_product(self, dtype: torch.dtype) -> None:
        """Fails if the weight gradient is transposed, or rows are quantised along the wrong dimension."""
        x, w, g = self.case(dtype)
        out = linear(x, w)
        got = torch.autograd.grad(out, (x, w), g)
        want = g.float() @ w.float(), g.float().t() @ x.float()
        assert out.dtype == dtype
        assert [gradient.dtype for gradient in got] == [dtype, dtype]
        assert relative(out, x.float() @ w.float().t()) < 0.05
        for mine, plain in zip(got, want, strict=True):
            assert 0.01 < relative(mine, plain) < 0.05

    def test_gradients_equal_the_plain_twin_on_what_the_operands_stand_for(self) -> None:
        """To fp32 rounding: nothing but the quantisation differs."""
        x, w, g = self.case()
        got = torch.autograd.grad(linear(x, w), (x, w), g)
        q = quantise_rows
        with torch.no_grad():
            want = reference_scaled_matmul(q(g), q(w.t())), reference_scaled_matmul(q(g.t()), q(x.t()))
        for mine, plain in zip(got, want, strict=True):
            assert relative(mine, plain) < 1e-5

    def test_it_compiles_as_a_whole_and_gives_the_same_gradients(self) -> None:
        """fullgraph: the custom autograd function is traced through, not around."""
        apply_torch_config()

        def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return linear(torch.nn.functional.silu(linear(x, w)), w.t().contiguous())

        x, w, _ = self.case()
        g = random(64, 48, seed=7)
        want = torch.autograd.grad(chain(x, w), (x, w), g)
        got = torch.autograd.grad(torch.compile(chain, fullgraph=True, dynamic=False)(x, w), (x, w), g)
        for mine, plain in zip(got, want, strict=True):
            assert relative(mine, plain) < 0.02

    def test_an_input_without_gradient_costs_none(self) -> None:
        """The target's hidden states need no gradient; asking for it anyway would be the largest product of all."""
        x, w, g = self.case()
        (only,) = torch.autograd.grad(linear(x.detach(), w), (w,), g)
        (both,) = torch.autograd.grad(linear(x, w), (w,), g)
        assert torch.equal(only, both)

    def test_a_gradient_that_is_not_finite_stays_visible(self) -> None:
        """The step refuses an update whose norm is not finite; that guard must see through 8 bits."""
        x, w, g = self.case()
        g[3, 5] = math.inf
        to_x, to_w = torch.autograd.grad(linear(x, w), (x, w), g)
        assert not torch.isfinite(to_x[3]).any()
        assert not torch.isfinite(to_w[5]).any()

    def test_rows_that_cannot_be_summed_over_are_refused(self) -> None:
        """M is summed over in the weight gradient; without the check only backward would fail."""
        with pytest.raises(ValueError, match="multiple of 16"):
            linear(torch.zeros(8, 16), torch.zeros(16, 16))
