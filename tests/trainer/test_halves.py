"""Master weights in two halves against fp32 master weights held plainly: every bit equal.

Seen to fail: with `kept` always 0, all but the tests over infinities and over steps; with NaN rounded like numbers, the
test over NaN; with the second moment restored without its sign, the resume of a step.
"""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.trainer.small_step import make_batch, make_config, make_drafter, make_ends
from trainer.config import OptimConfig, TrainConfig
from trainer.halves import joined, split
from trainer.optim import FlatAdamW, adamw_update
from trainer.step import TrainStep

LOWER_EDGES = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
# Zeros, denormals, the smallest and the largest numbers, odd and even ones, both infinities, of both signs.
UPPERS = torch.tensor([0x0000, 0x0001, 0x007F, 0x0080, 0x0081, 0x3F80, 0x3F81, 0x4049, 0x7F7E, 0x7F7F])


def as_bits(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """All combinations, of both signs, as int32."""
    both = torch.cat((upper, upper | 0x8000)).to(torch.int64)
    bits = ((both << 16).unsqueeze(1) + lower).flatten()
    return (bits - ((bits >> 31) << 32)).to(torch.int32)


@pytest.mark.parametrize(
    ("uppers", "lowers"),
    [(torch.arange(0x7F80), LOWER_EDGES), (UPPERS, torch.arange(0x10000)), (torch.tensor([0x7F80]), torch.tensor([0]))],
    ids=["every exponent and mantissa", "every lower half", "infinities"],
)
def test_every_number_is_its_bf16_rounding_and_comes_back(uppers: torch.Tensor, lowers: torch.Tensor) -> None:
    """Torch's own cast says what the working weight is. All 2^32 patterns were gone through once."""
    bits = as_bits(uppers, lowers)
    working, rest, kept = split(bits)
    assert torch.equal(working, bits.view(torch.float32).to(torch.bfloat16).view(torch.int16))
    assert torch.equal(joined(working, rest, kept), bits)


def test_only_a_tie_needs_the_bit_that_16_do_not_hold() -> None:
    bits = as_bits(UPPERS, torch.arange(0x10000))
    upper, lower = bits >> 16, bits & 0xFFFF
    assert torch.equal(split(bits)[2] == 1, (lower == 0x8000) & (upper & 1 == 0))


def test_what_is_no_number_stays_none() -> None:
    bits = as_bits(torch.arange(0x7F80, 0x8000), LOWER_EDGES)
    bits = bits[bits.view(torch.float32).isnan()]
    working, rest, kept = split(bits)
    assert working.view(torch.bfloat16).isnan().all()
    back = joined(working, rest, kept)
    assert back.view(torch.float32).isnan().all()
    quiet = (bits & 0x400000) != 0
    assert torch.equal(back[quiet], bits[quiet])


def plain_update(
    weights: torch.Tensor, master: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, *rest: Any
) -> None:
    """The reference: an fp32 master beside its bf16 copy."""
    adamw_update(master, None, mean, square, *rest)
    weights.copy_(master)


def start() -> torch.Tensor:
    """Masters of every kind, ties of both parities first."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(3000, generator=generator) * 0.05
    ties = as_bits(UPPERS[:-2], torch.tensor([0x8000])).view(torch.float32)
    return torch.cat((ties, drawn, torch.zeros(3)))


def follow(steps: int) -> tuple[FlatAdamW, list[torch.Tensor], int]:
    """A split and a plain optimizer through the same updates: the first, the second's (master, mean, square), and how
    many of its masters were ties on the way.
    """
    config = OptimConfig(lr=3e-3, weight_decay=0.1, warmup_ratio=0.1)
    plain = [start(), torch.zeros_like(start()), torch.zeros_like(start())]
    working = plain[0].to(torch.bfloat16)
    mine, ties = FlatAdamW(config, steps, working.clone(), plain[0]), 0
    assert torch.equal(mine.weights_P, working)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        gradient = torch.randn(working.shape, generator=generator) * (0.0 if step % 50 == 7 else 2.0)
        gradient[torch.rand(working.shape, generator=generator) < 0.2] = 0.0
        if step % 50 == 9:
            gradient[5] = torch.inf
        gradient = gradient.to(torch.bfloat16)
        mine.apply(gradient, torch.tensor(0.0 if step % 50 == 11 else 4.0))
        plain_update(working, *plain, gradient, mine.scalars, *config.betas, config.eps)
        assert torch.equal(mine.weights_P.view(torch.int16), working.view(torch.int16))
        ties += int(((plain[0].view(torch.int32) & 0xFFFF) == 0x8000).sum())
    return mine, plain, ties


def test_hundreds_of_updates_are_bit_for_bit_those_of_a_plain_master() -> None:
    mine, plain, ties = follow(300)
    assert ties > 5, "few ties were met on the way: the test says less than it should"
    state = mine.state_dict()
    for name, wanted in zip(("master", "mean", "square"), plain, strict=True):
        assert torch.equal(state[name].view(torch.int32), wanted.view(torch.int32)), name
    assert mine.fingerprint() == int(plain[0].view(torch.int32).sum(dtype=torch.int64))


def test_a_state_of_a_plain_master_is_taken_over_and_given_back() -> None:
    """Checkpoints hold the fp32 master, whatever holds it in between."""
    _, plain, _ = follow(20)
    mine = FlatAdamW(OptimConfig(), 20, torch.zeros_like(plain[0], dtype=torch.bfloat16), torch.zeros_like(plain[0]))
    given = dict(zip(("master", "mean", "square"), plain, strict=True)) | {"step": torch.tensor(20)}
    mine.load_state_dict(given)
    assert torch.equal(mine.weights_P, plain[0].to(torch.bfloat16))
    assert all(torch.equal(value, given[name]) for name, value in mine.state_dict().items())


def test_compiled_it_is_one_pass_and_the_same_bits() -> None:
    """Ties and zeros of either sign included, which a code generator may treat as it likes in floating point."""
    config = OptimConfig()
    compiled = torch.compile(adamw_update, fullgraph=True, dynamic=False)
    starts = start()
    mine, other = (FlatAdamW(config, 9, starts.to(torch.bfloat16), starts) for _ in range(2))
    gradient = torch.zeros_like(mine.weights_P)
    scalars = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])  # a rate of zero: masters must come through as they are
    constants = (scalars, *config.betas, config.eps)
    adamw_update(*other._buffers(), gradient, *constants)
    _, code = run_and_get_code(compiled, *mine._buffers(), gradient, *constants)
    for name in ("weights_P", "_rest_P", "_square_P"):
        one, two = getattr(mine, name), getattr(other, name)
        assert torch.equal(one.view(torch.int8), two.view(torch.int8)), name
    assert torch.equal(mine.state_dict()["master"], starts)
    kernels = set(re.findall(r"cpp_fused_\w+", "".join(code)))
    assert len(kernels) == 1, kernels


def bf16_step() -> tuple[TrainConfig, TrainStep]:
    config = make_config()
    config = replace(config, target=replace(config.target, dtype="bfloat16"))
    return config, TrainStep(config, make_drafter(config), make_ends(), "cpu")


def wide_buffers(total: int) -> set[int]:
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.float32]
    return {x.data_ptr() for x in tensors if x.numel() == total}


def test_a_step_in_bf16_holds_no_fp32_master() -> None:
    """Of what a step keeps, only the moments are as large. Failed with the optimizer holding on to `master_P`."""
    total = bf16_step()[1].layout.total
    before = wide_buffers(total)
    _, step = bf16_step()
    assert len(wide_buffers(total) - before) == 2, step


def test_a_step_in_bf16_resumes_bit_for_bit() -> None:
    config, through = bf16_step()
    _, resumed = bf16_step()
    for index in range(6):
        if index == 3:
            resumed.load_state_dict(through.state_dict())
        for step in (through, resumed) if index >= 3 else (through,):
            step.load(make_batch(config, index))
            step.accumulate()
            step.apply()
    assert through.fingerprint() == resumed.fingerprint()
    state, other = through.state_dict(), resumed.state_dict()
    assert all(torch.equal(state[name], other[name]) for name in state)
    for name, weight in through.weights().items():
        assert torch.equal(weight, resumed.weights()[name])
        assert torch.equal(weight, through.layout.views(state["master"])[name].to(torch.bfloat16))
