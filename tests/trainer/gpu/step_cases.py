"""The step: equal however it is computed, equal to its references, without waits and in flat memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.trainer.gpu.setting import DEVICE, gpu_batch, gpu_config, gpu_step, on_one_thread, train, warmed
from trainer import torch_setup
from trainer.config import OptimConfig, StepConfig
from trainer.graphs import compiled
from trainer.model.attention import FlexAttention, layer_layouts
from trainer.model.block_tables import BlockTables, ContextSpans, MaskLayout
from trainer.model.mask import attend_dense, dense_mask
from trainer.optim import FlatAdamW, adamw_update
from trainer.step import StepMetrics


def captured_equals_uncaptured() -> None:
    """The same 40 steps by graph replay, by plain launches, and by chunked SDPA."""
    batches = [gpu_batch(gpu_config(), i) for i in range(40)]

    def run(graphs: str, attention: str) -> tuple[list[StepMetrics], dict[str, torch.Tensor]]:
        step = gpu_step(gpu_config(graphs, attention))
        step.warm_up()
        assert step.captured == (graphs == "step")
        return train(step, batches), {k: v.float().cpu() for k, v in step.weights().items()}

    replayed, weights = on_one_thread(lambda: run("step", "flex"))
    launched, others = on_one_thread(lambda: run("none", "flex"))
    twin, _ = on_one_thread(lambda: run("none", "sdpa"))
    print("losses", [round(m[i].loss, 5) for i in (0, 1, 20, 39) for m in (replayed, launched, twin)])
    print("norms ", [round(m[i].grad_norm, 5) for i in (0, 1, 20, 39) for m in (replayed, launched, twin)])
    assert replayed == launched
    assert all(torch.equal(weights[k], others[k]) for k in weights)
    for a, b in zip(replayed, twin, strict=True):
        assert abs(a.loss - b.loss) < 0.02 * abs(b.loss)
        assert abs(a.grad_norm - b.grad_norm) < 0.1 * b.grad_norm


def step_options_equal_the_plain_step() -> None:
    """`step.*` changes how a step is computed: losses and gradient norms stay, to the rounding of 16 or 8 bits."""
    allowed = {
        StepConfig(recompute="elementwise"): 0.005,
        StepConfig(recompute="elementwise", recompute_mlps=1): 0.005,
        StepConfig(fp8=True): 0.05,
        StepConfig(fp8=True, recompute_mlps=2): 0.05,
    }
    config = gpu_config()
    # 8-bit products sum over context tokens, so their number must be a multiple of 16.
    config = replace(config, data=replace(config.data, token_budget=1008))
    batches = [gpu_batch(config, index) for index in range(3)]

    def life(options: StepConfig) -> list[StepMetrics]:
        return train(warmed(replace(config, step=options)), batches)

    want = on_one_thread(lambda: life(StepConfig(recompute="none")))
    for options, tolerance in allowed.items():
        for mine, plain in zip(on_one_thread(partial(life, options)), want, strict=True):
            print(options, mine.loss, plain.loss, mine.grad_norm, plain.grad_norm)
            assert mine.updated
            assert abs(mine.loss - plain.loss) < tolerance * plain.loss
            assert abs(mine.grad_norm - plain.grad_norm) < 4 * tolerance * plain.grad_norm


def masters_in_halves_equal_plain_ones() -> None:
    """The compiled update on the device: masters in two halves against plain ones, bit for bit, ties among them."""
    elements, steps = (20_011, 20) if DEVICE == "cpu" else (4_000_011, 60)
    generator = torch.Generator(DEVICE).manual_seed(1)
    masters = torch.randn(elements, generator=generator, device=DEVICE) * 0.05
    ties = (torch.arange(-4096, 4096, device=DEVICE, dtype=torch.int32) << 19) + (1 << 15)
    masters[: ties.numel()] = torch.nan_to_num(ties.view(torch.float32), 1.0)
    config = OptimConfig(lr=3e-3, weight_decay=0.1)
    update = torch.compile(adamw_update, fullgraph=True, dynamic=False)
    mine = FlatAdamW(config, steps, masters.to(torch.bfloat16), masters.clone(), lambda _: update)
    plain = FlatAdamW(config, steps, masters, masters, lambda _: update)
    for step in range(steps):
        gradient = torch.randn(elements, generator=generator, device=DEVICE)
        gradient[: elements // 2 if step % 2 else 4096] = 0.0
        for optimizer in (mine, plain):
            optimizer.apply(gradient.to(torch.bfloat16), torch.tensor(4.0 if step % 7 else 0.0, device=DEVICE))
        assert torch.equal(mine.weights_P, masters.to(torch.bfloat16)), step
    assert mine.fingerprint() == plain.fingerprint()
    found, want = mine.state_dict(), plain.state_dict()
    assert all(torch.equal(found[name], want[name]) for name in want)


def flex_equals_the_oracle() -> None:
    """Compiled flex over our tables against a float64 softmax over the dense mask, gradients included."""
    torch_setup.apply_torch_config()
    config = gpu_config()
    layouts = layer_layouts(config.drafter, config.data.token_budget, config.data.block_slots)
    attend = FlexAttention(layouts, torch.device(DEVICE))
    function = compiled(call_attention, torch.device(DEVICE))
    worst = 0.0
    for index in range(4):
        packed = gpu_batch(config, index).packed
        args = [x.to(DEVICE) for x in (packed.anchors_N, packed.keep_N, packed.doc_ids_T, packed.cu_seqlens_D1)]
        attend.fill(*args)
        for layer, layout in enumerate(layouts):
            generator = torch.Generator(DEVICE).manual_seed(index)
            shapes = ((4, layout.queries, 32), (2, layout.keys, 32), (2, layout.keys, 32))
            inputs = [
                torch.randn(s, generator=generator, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
                for s in shapes
            ]
            wide = [x.detach().float().requires_grad_() for x in inputs]
            mask = dense_mask(*args[:3], layout.block_size, layout.window, layout.causal)
            out, expected = function(attend, layer, *inputs), attend_dense(*wide, mask)
            assert torch.all(out[:, ~mask.any(1)] == 0)
            upstream = torch.randn(out.shape, generator=generator, device=DEVICE)
            grads = torch.autograd.grad(out, inputs, upstream.to(out.dtype))
            expected_grads = torch.autograd.grad(expected, wide, upstream)
            for a, b in zip((out, *grads), (expected, *expected_grads), strict=True):
                error = float((a.float() - b).norm() / b.norm())
                worst = max(worst, error)
                assert error < 1e-2, (index, layer, error)
    print("worst relative error", worst)


def call_attention(attend: Any, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = attend(layer, q, k, v)
    return out


def tables_in_a_graph_equal_tables_on_the_cpu() -> None:
    layout = MaskLayout(context=1000, slots=96, block_size=8, window=100)
    config = gpu_config()
    for index in range(5):
        packed = gpu_batch(config, index).packed
        results = []
        for device in ("cpu", DEVICE):
            args = [x.to(device) for x in (packed.anchors_N, packed.keep_N, packed.doc_ids_T, packed.cu_seqlens_D1)]
            spans = ContextSpans.empty(96, torch.device(device))
            tables = BlockTables.empty(layout, torch.device(device))
            spans.fill(*args)
            tables.fill(layout, spans)
            results.append([getattr(tables, f).cpu() for f in BlockTables.__dataclass_fields__])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def steady_step_never_waits_for_the_device() -> None:
    def run(graphs: str) -> None:
        config = gpu_config(graphs)
        step = gpu_step(config)
        step.warm_up()
        batches = [gpu_batch(config, i) for i in range(4)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches * 5:
                step.load(batch)
                step.accumulate()
                step.apply()
            with pytest.raises(RuntimeError, match="synchroniz"):
                step.metrics()  # so the mode does see a read-back
        finally:
            torch.cuda.set_sync_debug_mode("default")

    on_one_thread(lambda: run("step"))
    on_one_thread(lambda: run("none"))


def memory_is_flat() -> None:
    def run() -> None:
        config = gpu_config()
        step = gpu_step(config)
        step.warm_up()
        batches = [gpu_batch(config, i) for i in range(4)]
        train(step, batches * 5)
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        train(step, batches * 50)
        step.fingerprint(), step.state_dict()  # what a checkpoint asks for
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
        stats = torch.cuda.memory_stats()
        assert stats["num_alloc_retries"] == 0
        assert stats["num_ooms"] == 0
        print("bytes allocated and reserved", before)

    on_one_thread(run)
