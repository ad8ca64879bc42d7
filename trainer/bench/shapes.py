"""The shapes that benchmarks speak of, and a drafter step of one of them on random data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from trainer.config import DataConfig, DrafterConfig, OptimConfig, RunConfig, TargetConfig, TrainConfig
from trainer.data.batch import HiddenBatch, PackedBatch
from trainer.model.drafter import Drafter, DrafterShape
from trainer.step import TargetEnds, TrainStep


@dataclass(frozen=True, slots=True)
class BenchShape:
    """A drafter and its target's width."""

    hidden_size: int
    vocab_size: int
    features: int
    drafter: DrafterConfig
    document_tokens: int
    anchors: int
    """Per document."""


SHAPES: dict[str, BenchShape] = {
    "27b": BenchShape(5120, 248320, 5, DrafterConfig(), 4096, 512),
    "8b": BenchShape(4096, 151936, 5, replace(DrafterConfig(), intermediate_size=12288), 4096, 512),
    "tiny": BenchShape(
        256,
        4096,
        3,
        DrafterConfig(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384, block_size=8),
        512,
        48,
    ),
}


def bench_config(
    shape: BenchShape, documents: int, *, attention: str, graphs: str, device: torch.device
) -> TrainConfig:
    """The run's configuration for `documents` equal documents in one packed row."""
    tokens = shape.document_tokens * documents
    return TrainConfig(
        variant="bench",
        attention="flex" if attention == "flex" else "sdpa",
        graphs="step" if graphs == "step" else "none",
        compile=attention == "flex",
        target=TargetConfig(num_features=shape.features, dtype="bfloat16" if device.type == "cuda" else "float32"),
        drafter=shape.drafter,
        data=DataConfig(
            token_budget=tokens,
            block_slots=shape.anchors * documents,
            max_documents=documents,
            max_document_tokens=shape.document_tokens,
        ),
        optim=OptimConfig(),
        run=RunConfig(max_steps=10000),
    )


def drafter_shape(shape: BenchShape) -> DrafterShape:
    """The drafter's dimensions."""
    return DrafterShape(
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_features=shape.features,
        rope_theta=1e7,
        config=shape.drafter,
    )


def random_drafter(shape: DrafterShape, device: torch.device) -> Drafter:
    """A drafter with random weights drawn on the device (drawing 1.7 billion on a CPU takes longer than the run)."""
    drafter = Drafter.empty(shape, device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return drafter


def bench_step(shape: BenchShape, config: TrainConfig, device: torch.device) -> TrainStep:
    """A training step with random weights, embedding and head."""
    dtype = getattr(torch, config.target.dtype)
    generator = torch.Generator(device).manual_seed(1)
    ends = [
        torch.empty(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype).normal_(
            0, 0.02, generator=generator
        )
        for _ in range(2)
    ]
    return TrainStep(
        config, random_drafter(drafter_shape(shape), device), TargetEnds(ends[0], ends[1], shape.vocab_size - 1), device
    )


def random_batch(
    shape: BenchShape, config: TrainConfig, documents: int, index: int, device: torch.device
) -> HiddenBatch:
    """`documents` full documents, the given number of anchors in each, all supervised."""
    generator = torch.Generator().manual_seed(index)
    length, tokens = shape.document_tokens, config.data.token_budget
    anchors = torch.cat(
        [
            torch.randperm(length - shape.drafter.block_size, generator=generator)[: shape.anchors].sort().values
            + document * length
            for document in range(documents)
        ]
    )
    packed = PackedBatch(
        index=index,
        cursor={},
        input_ids_T=torch.randint(0, shape.vocab_size - 1, (tokens,), generator=generator),
        positions_T=torch.arange(length).repeat(documents),
        doc_ids_T=torch.arange(documents, dtype=torch.int32).repeat_interleave(length),
        loss_mask_T=torch.ones(tokens, dtype=torch.bool),
        cu_seqlens_D1=torch.arange(documents + 1, dtype=torch.int32) * length,
        anchors_N=anchors.to(torch.int32),
        keep_N=torch.ones(anchors.numel(), dtype=torch.bool),
        documents=documents,
        tokens=tokens,
    )
    on_device = torch.Generator(device).manual_seed(index)
    hidden_TKH = torch.empty(
        tokens, shape.features * shape.hidden_size, device=device, dtype=getattr(torch, config.target.dtype)
    )
    return HiddenBatch(packed=packed, hidden_TKH=hidden_TKH.normal_(generator=on_device))


def model_flops(shape: BenchShape, documents: int) -> float:
    """Model FLOPs of one step, attention scores not counted: 6(P - fc)R + 6(fc + kv)C - 2 fc C + 4 H V R.

    R block tokens, C context tokens, P drafter parameters, kv all key and value projections. The head is frozen, so it
    costs a forward and the gradient to its input: 4 H V R. `fc` needs no gradient to its input: - 2 fc C.
    """
    hidden, config = shape.hidden_size, shape.drafter
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = hidden * (2 * heads + 2 * kv_heads) + 3 * hidden * config.intermediate_size
    fc = shape.features * hidden * hidden
    kv = config.num_layers * 2 * hidden * kv_heads
    parameters = config.num_layers * layer + fc
    rows = documents * shape.anchors * config.block_size
    context = documents * shape.document_tokens
    return (
        6.0 * (parameters - fc) * rows
        + 6.0 * (fc + kv) * context
        - 2.0 * fc * context
        + 4.0 * hidden * shape.vocab_size * rows
    )
