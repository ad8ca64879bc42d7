"""What the GPU cases share: the small drafter on a device, its batches, and threads that keep to the rules."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.trainer.small_step import FEATURES, lay_out, make_batch, make_config
from trainer import torch_setup
from trainer.config import TrainConfig
from trainer.data.batch import HiddenBatch
from trainer.model.anchors import anchor_generator, sample_anchors
from trainer.model.drafter import Drafter, DrafterShape
from trainer.step import StepMetrics, TargetEnds, TrainStep

DEVICES = sys.argv[2].split(",") if len(sys.argv) > 2 else []
"""Of the command line of `cases.py`, the one program that imports this."""
DEVICE = DEVICES[0] if DEVICES else "cuda:0"


def gpu_config(graphs: str = "step", attention: str = "flex", **optim: float) -> TrainConfig:
    """A small drafter whose shapes still fill several tiles."""
    config = make_config(**optim)
    if DEVICE == "cpu":
        graphs, attention = "none", "sdpa"
    return replace(
        config,
        attention=attention,
        graphs=graphs,
        compile=attention == "flex",
        target=replace(config.target, dtype="float32" if DEVICE == "cpu" else "bfloat16"),
        drafter=replace(
            config.drafter, head_dim=32, block_size=8, intermediate_size=192, sliding_window=100, sliding_layers=(1,)
        ),
        data=replace(config.data, token_budget=1000, block_slots=96, max_document_tokens=600),
        loss=replace(config.loss, chunk_rows=256),
        run=replace(config.run, max_steps=400),
    )


GPU_HIDDEN, GPU_VOCAB = 128, 1000


def gpu_step(config: TrainConfig, device: str = DEVICE) -> TrainStep:
    shape = DrafterShape(
        hidden_size=GPU_HIDDEN, vocab_size=GPU_VOCAB, num_features=FEATURES, rope_theta=1e4, config=config.drafter
    )
    generator = torch.Generator().manual_seed(5)
    ends = TargetEnds(
        *(torch.randn(GPU_VOCAB, GPU_HIDDEN, generator=generator) * 0.2 for _ in range(2)), mask_token_id=GPU_VOCAB - 1
    )
    return TrainStep(config, Drafter(shape), ends, device)


def gpu_batch(config: TrainConfig, index: int, device: str = DEVICE) -> HiddenBatch:
    """As `make_batch`, with longer documents: the small one's, stretched."""
    batch = make_batch(config, index)
    packed = batch.packed
    generator = torch.Generator().manual_seed(index)
    tokens, lengths = config.data.token_budget, [400 + 7 * (index % 9), 150, 300]
    ids = torch.randint(0, GPU_VOCAB - 1, (tokens,), generator=generator)
    doc_ids, positions, cu_seqlens = lay_out(config, lengths)
    mask = (torch.rand(tokens, generator=generator) < 0.7) & (doc_ids >= 0)
    anchors, keep = sample_anchors(mask, doc_ids, config.data.block_slots, anchor_generator(0, index))
    keep = keep & (torch.arange(keep.numel()) < keep.numel() - 3)
    anchors = torch.where(keep, anchors, tokens)
    packed = dataclasses.replace(
        packed,
        input_ids_T=ids,
        positions_T=positions,
        doc_ids_T=doc_ids,
        loss_mask_T=mask,
        cu_seqlens_D1=cu_seqlens,
        anchors_N=anchors.to(torch.int32),
        keep_N=keep,
        tokens=sum(lengths),
    )
    hidden = torch.randn(tokens, FEATURES * GPU_HIDDEN, generator=generator)
    return HiddenBatch(packed=packed, hidden_TKH=hidden.to(device, getattr(torch, config.target.dtype)))


def warmed(config: TrainConfig) -> TrainStep:
    step = gpu_step(config)
    step.warm_up()
    return step


def train(step: TrainStep, batches: list[HiddenBatch]) -> list[StepMetrics]:
    losses = []
    for batch in batches:
        step.load(batch)
        step.accumulate()
        step.apply()
        losses.append(step.metrics())
    return losses


def in_threads(functions: dict[str, Callable[[], Any]], deadline_s: float = 240.0) -> dict[str, Any]:
    """Run each in a thread of its own; results or exceptions by name."""
    results: dict[str, Any] = {}

    def guarded(name: str, function: Callable[[], Any]) -> None:
        try:
            results[name] = function()
        except BaseException as error:  # noqa: BLE001  # reported by name
            results[name] = error

    threads = [threading.Thread(target=guarded, args=item, name=item[0], daemon=True) for item in functions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
    missing = set(functions) - set(results)
    assert not missing, f"no end in {deadline_s} s: {sorted(missing)}"
    return results


def as_drafter(function: Callable[[], Any], device: str = DEVICE) -> Callable[[], Any]:
    def run() -> Any:
        with torch_setup.thread_rules("drafter", device):
            return function()

    return run


def on_one_thread(function: Callable[[], Any], role: torch_setup.Role = "drafter") -> Any:
    """The function's result from one thread that keeps to the rules."""

    def run() -> Any:
        with torch_setup.thread_rules(role, DEVICE):
            return function()

    result = in_threads({"only": run})["only"]
    if isinstance(result, BaseException):
        raise result
    return result
