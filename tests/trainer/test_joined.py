"""Projections of one input as one product: the same numbers, names and bytes, in two products instead of five.

Seen to fail: gate and up swapped in the joined matrix, the context given the queries' rows, a gradient that lands in a
tensor of its own instead of the flat buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.trainer.small_step import make_batch, make_config, make_drafter, make_ends
from tests.trainer.test_drafter import shape_of
from trainer.model.drafter import Drafter
from trainer.optim import FlatLayout, flatten_parameters
from trainer.step import TrainStep
from trainer.torch_setup import apply_torch_config, compile_counts


def flat_drafter(seed: int = 0, *, join: bool, **changes: int) -> tuple[Drafter, torch.Tensor]:
    """A drafter over one flat buffer, and the buffer of its gradients."""
    drafter = Drafter(shape_of(**changes), torch.Generator().manual_seed(seed))
    layout, flat = flatten_parameters(drafter, torch.float32, torch.device("cpu"))
    grads = torch.zeros_like(flat)
    for (_, parameter), grad in zip(drafter.named_parameters(), layout.views(grads).values(), strict=True):
        parameter.grad = grad

    def joined(names: Sequence[str]) -> torch.Tensor | None:
        weight, grad = layout.joined(flat, names), layout.joined(grads, names)
        if weight is None:
            return None
        leaf = weight.detach().requires_grad_()
        leaf.grad = grad
        return leaf

    if join:
        drafter.join(joined)
    return drafter, grads


def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v.repeat_interleave(2, 0)


def run(drafter: Drafter, forward=None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    hidden, embeds = torch.randn(10, 72, generator=generator), torch.randn(8, 24, generator=generator)
    call = forward or (lambda model, *inputs: model(*inputs))
    out: torch.Tensor = call(drafter, hidden, torch.arange(10), embeds, torch.arange(8), attend)
    out.backward(torch.randn(8, 24, generator=generator))
    return out.detach()


def test_outputs_and_every_gradient_are_the_same() -> None:
    (apart, want), (together, got) = flat_drafter(join=False), flat_drafter(join=True)
    assert apart.layers[0].self_attn.qkv_CH is None
    assert together.layers[0].self_attn.qkv_CH.shape == (64, 24)
    assert together.layers[1].mlp.gate_up_CH.shape == (96, 24)
    assert torch.allclose(run(together), run(apart), atol=1e-5)
    assert want.abs().sum() > 0
    assert torch.allclose(got, want, atol=1e-5)


def test_names_and_state_are_those_of_the_separate_projections() -> None:
    (apart, _), (together, _) = flat_drafter(join=False), flat_drafter(join=True)
    mine, theirs = together.state_dict(), apart.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert [name for name, _ in together.named_parameters()] == [name for name, _ in apart.named_parameters()]


def test_loading_weights_in_place_reaches_the_joined_matrix() -> None:
    together, _ = flat_drafter(join=True)
    other = Drafter(shape_of(), torch.Generator().manual_seed(7))
    together.load_state_dict(other.state_dict())
    assert torch.equal(together.layers[0].self_attn.qkv_CH[:32], other.layers[0].self_attn.q_proj.weight)


def test_matrices_that_padding_separates_stay_apart() -> None:
    """24 * 6 values fill two and a quarter lines of 64, so the next matrix starts later."""
    drafter, grads = flat_drafter(join=True, head_dim=6, num_heads=1, num_kv_heads=1)
    assert drafter.layers[0].self_attn.qkv_CH is None
    assert drafter.layers[0].mlp.gate_up_CH is not None
    assert grads.numel() == FlatLayout.of(drafter).total


def test_where_each_parameter_lies_is_what_checkpoints_of_earlier_versions_hold() -> None:
    """Offsets of the version before projections were joined."""
    layout = FlatLayout.of(Drafter(shape_of()))
    where = dict(zip(layout.names, layout.offsets, strict=True))
    assert [name for name in layout.names if name.startswith("layers.0")] == [
        f"layers.0.{part}.weight"
        for part in (
            "input_layernorm",
            *(f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
            "post_attention_layernorm",
            *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        )
    ]
    assert where["layers.0.self_attn.q_proj.weight"] == 1856
    assert where["layers.1.mlp.up_proj.weight"] == 11520
    assert layout.total == 13888


def test_a_training_step_joins_and_its_flat_gradient_is_complete() -> None:
    config = make_config()
    step = TrainStep(config, make_drafter(config), make_ends(), "cpu")
    assert step.drafter.layers[0].self_attn.qkv_CH is not None
    step.load(make_batch(config, 0))
    step.accumulate()
    assert all(bool(grad.any()) for grad in step.layout.views(step.grads).values())


def test_two_drafters_share_one_compiled_graph() -> None:
    """Each has joined matrices of its own; a guard on their identity would compile the second one again."""
    apply_torch_config()
    forward = torch.compile(lambda model, *inputs: model(*inputs), fullgraph=True, dynamic=False, backend="aot_eager")
    before = compile_counts()
    one, two = flat_drafter(join=True)[0], flat_drafter(3, join=True)[0]
    first = run(one, forward)
    after_one = compile_counts()
    second = run(two, forward)
    assert before != after_one
    assert compile_counts() == after_one
    assert not torch.allclose(first, second)
    assert torch.allclose(second, run(two), atol=1e-5)
