"""The chunked loss against the plain one: values, gradients, hits; and acceptance lengths by hand."""

from __future__ import annotations

import pytest
import torch

from trainer.model.loss import (
    Teacher,
    accept_lengths,
    block_loss,
    dpace,
    dpace_weights,
    reference_block_loss,
    teacher_choices,
)

ROWS, WIDTH, VOCAB = 24, 16, 50


def case(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    head = (torch.randn(VOCAB, WIDTH, generator=generator) * 0.5).to(dtype)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    weights = torch.rand(ROWS, generator=generator) * (torch.rand(ROWS, generator=generator) > 0.3)
    return hidden, head, labels, weights


@pytest.mark.parametrize("chunk_rows", [1, 5, 24, 100])
def test_chunked_loss_equals_the_plain_one(chunk_rows: int) -> None:
    """Failed when the label's -1 was left out of the gradient, and when the chunk's weights were not sliced."""
    hidden, head, labels, weights = case()
    fast, plain = (
        block_loss(hidden, head, labels, weights, chunk_rows),
        reference_block_loss(hidden, head, labels, weights),
    )
    assert torch.allclose(fast.numerator, plain.numerator, rtol=1e-6)
    assert torch.equal(fast.denominator, plain.denominator)
    assert torch.equal(fast.hits_Q, plain.hits_Q)
    assert fast.correct == plain.correct
    assert fast.counted == (weights > 0).sum()
    (got,) = torch.autograd.grad(fast.numerator / 3, hidden)
    (want,) = torch.autograd.grad(plain.numerator / 3, hidden)
    assert torch.allclose(got, want, atol=1e-6)


def test_bf16_stays_close_to_fp32() -> None:
    hidden, head, labels, weights = case(torch.bfloat16)
    fast, plain = block_loss(hidden, head, labels, weights, 7), reference_block_loss(hidden, head, labels, weights)
    assert torch.allclose(fast.numerator, plain.numerator, rtol=1e-2)
    (got,) = torch.autograd.grad(fast.numerator, hidden)
    (want,) = torch.autograd.grad(plain.numerator, hidden)
    assert torch.nn.functional.cosine_similarity(got.float().flatten(), want.float().flatten(), dim=0) > 0.999


def test_the_head_gets_no_gradient_and_unweighted_rows_none() -> None:
    hidden, head, labels, weights = case()
    head.requires_grad_()
    block_loss(hidden, head, labels, weights, 8).numerator.backward()
    assert head.grad is None
    assert hidden.grad is not None
    assert not hidden.grad[weights == 0].any()
    assert hidden.grad[weights > 0].any(dim=1).all()


def test_large_logits_do_not_overflow() -> None:
    hidden, head, labels, weights = case()
    fast = block_loss(hidden * 1e3, head, labels, weights, 8)
    assert fast.numerator.isfinite()


def test_sums_over_parts_make_the_whole() -> None:
    """Numerators and denominators add up, so a global denominator equals one large batch."""
    hidden, head, labels, weights = case()
    whole = block_loss(hidden, head, labels, weights, 8)
    parts = [block_loss(hidden[s], head, labels[s], weights[s], 8) for s in (slice(0, 9), slice(9, ROWS))]
    assert torch.allclose(sum(p.numerator for p in parts), whole.numerator)
    gradients = [torch.autograd.grad(sum(p.numerator for p in parts) / whole.denominator, hidden)[0]]
    gradients += [torch.autograd.grad(whole.numerator / whole.denominator, hidden)[0]]
    assert torch.allclose(*gradients, atol=1e-7)


@pytest.mark.parametrize(
    ("hits", "weights", "length"),
    [
        ("0111", "0111", 4),
        ("0110", "0111", 3),
        ("0011", "0111", 1),  # a miss ends the run, later hits do not count
        ("0111", "0110", 3),  # no label, no hit
        ("0101", "0101", 2),  # an unlabelled place ends the run
    ],
)
def test_acceptance_is_one_plus_the_leading_run(hits: str, weights: str, length: int) -> None:
    """Failed with a plain sum of hits."""
    flags = [torch.tensor([c == "1" for c in text]) for text in (hits, weights)]
    assert accept_lengths(flags[0], flags[1].float(), 4).tolist() == [length]


def test_dpace_weights_by_hand() -> None:
    """w_j = sum_{m>=j} prod_{i<=m} q_i. Failed with products that start at j."""
    q = torch.tensor([0.5, 0.8, 0.25])
    weights = dpace_weights(-q.log(), torch.ones(3), 3, smoothing=0.0)
    reached = [0.5, 0.5 * 0.8, 0.5 * 0.8 * 0.25]
    assert weights.tolist() == pytest.approx([sum(reached), sum(reached[1:]), reached[2]])
    smooth = dpace_weights(-q.log(), torch.ones(3), 3, smoothing=0.5)
    reached = [0.75, 0.75 * 0.9, 0.75 * 0.9 * 0.625]
    assert smooth.tolist() == pytest.approx([sum(reached), sum(reached[1:]), reached[2]])


def test_dpace_gives_no_weight_after_a_place_without_a_label() -> None:
    """Failed when products ran on over the gap."""
    weights = dpace_weights(torch.full((6,), 0.1), torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0]), 3, smoothing=0.5)
    assert (weights > 0).tolist() == [True, False, False, True, True, False]


def teacher_case() -> Teacher:
    generator = torch.Generator().manual_seed(9)
    final = torch.randn(10, WIDTH, generator=generator)
    return Teacher(final, torch.randint(0, 10, (ROWS,), generator=generator), case()[1])


@pytest.mark.parametrize("chunk_rows", [5, 24])
@pytest.mark.parametrize("kind", ["dpace", "kl", "kl and dpace"])
def test_the_options_equal_their_plain_forms(kind: str, chunk_rows: int) -> None:
    """Failed when the gradient kept the old weights, and with KL(drafter || target)."""
    hidden, head, labels, weights = case()
    options = {
        "teacher": teacher_case() if "kl" in kind else None,
        "reweigh": dpace(3, 0.5) if "dpace" in kind else None,
    }
    fast = block_loss(hidden, head, labels, weights, chunk_rows, **options)  # type: ignore[arg-type]  # by name above
    plain = reference_block_loss(hidden, head, labels, weights, **options)  # type: ignore[arg-type]  # by name above
    assert torch.allclose(fast.numerator, plain.numerator, rtol=1e-5)
    assert torch.allclose(fast.denominator, plain.denominator)
    assert torch.equal(fast.hits_Q, plain.hits_Q)
    (got,) = torch.autograd.grad(fast.numerator, hidden)
    (want,) = torch.autograd.grad(plain.numerator, hidden)
    assert torch.allclose(got, want, atol=1e-5)


def test_kl_vanishes_where_the_drafter_says_what_the_target_says() -> None:
    _, head, labels, weights = case()
    teacher = teacher_case()
    hidden = teacher.final_TH[teacher.source_Q].clone().requires_grad_()
    sums = block_loss(hidden, head, labels, weights, 8, teacher=teacher)
    assert abs(float(sums.numerator.detach())) < 1e-5
    (gradient,) = torch.autograd.grad(sums.numerator, hidden)
    assert gradient.abs().max() < 1e-5


def test_the_targets_choice_at_a_place_is_what_the_row_before_says() -> None:
    """Failed unshifted: the off-by-one that caps acceptance near a quarter."""
    head = torch.eye(6)
    final = torch.eye(6)[[3, 1, 4, 1]]  # row t says token [3, 1, 4, 1][t] comes next
    assert teacher_choices(final, head, chunk_rows=3).tolist() == [0, 3, 1, 4]
