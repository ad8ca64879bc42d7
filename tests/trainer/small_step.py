"""A training step small enough for tests: its parts, its batches, and what it does written plainly."""

from __future__ import annotations

import math

import torch
from torch import nn

from trainer.config import (
    DataConfig,
    DrafterConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    TargetConfig,
    TrainConfig,
)
from trainer.data.batch import HiddenBatch, PackedBatch
from trainer.model.anchors import anchor_generator, labels_and_weights, sample_anchors
from trainer.model.drafter import Drafter, DrafterShape
from trainer.model.loss import LossSums, Teacher, dpace, reference_block_loss
from trainer.model.mask import attend_dense, dense_mask
from trainer.step import TargetEnds, TrainStep

HIDDEN, VOCAB, FEATURES = 32, 61, 2


def make_config(**optim: float) -> TrainConfig:
    return TrainConfig(
        variant="sdpa",
        attention="sdpa",
        compile=False,
        target=TargetConfig(dtype="float32", num_features=FEATURES),
        drafter=DrafterConfig(
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            intermediate_size=48,
            block_size=4,
            sliding_window=9,
            sliding_layers=(1,),
        ),
        data=DataConfig(token_budget=64, block_slots=12, max_documents=4, max_document_tokens=32),
        loss=LossConfig(chunk_rows=16),
        optim=OptimConfig(**({"lr": 1e-2} | optim)),
        run=RunConfig(max_steps=40),
    )


def make_drafter(config: TrainConfig) -> Drafter:
    shape = DrafterShape(
        hidden_size=HIDDEN, vocab_size=VOCAB, num_features=FEATURES, rope_theta=1e4, config=config.drafter
    )
    return Drafter(shape)


def make_ends() -> TargetEnds:
    generator = torch.Generator().manual_seed(3)
    return TargetEnds(*(torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3 for _ in range(2)), VOCAB - 1)


def lay_out(config: TrainConfig, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(doc_ids [T], positions [T], cu_seqlens [D + 1]) of documents one after another; what is left of T is padding."""
    doc_ids = torch.full((config.data.token_budget,), -1, dtype=torch.int32)
    positions = torch.zeros(config.data.token_budget, dtype=torch.int64)
    bounds = [0]
    for document, length in enumerate(lengths):
        doc_ids[bounds[-1] : bounds[-1] + length] = document
        positions[bounds[-1] : bounds[-1] + length] = torch.arange(length)
        bounds.append(bounds[-1] + length)
    tail = [bounds[-1]] * (config.data.max_documents + 1 - len(bounds))
    return doc_ids, positions, torch.tensor(bounds + tail, dtype=torch.int32)


def make_batch(config: TrainConfig, index: int, supervised: bool = True) -> HiddenBatch:
    generator = torch.Generator().manual_seed(100 + index)
    tokens = config.data.token_budget
    lengths = [20 + index % 5, 11, 17]
    doc_ids, positions, cu_seqlens = lay_out(config, lengths)
    loss_mask = (torch.rand(tokens, generator=generator) < 0.8) & (doc_ids >= 0) & supervised
    anchors, keep = sample_anchors(loss_mask, doc_ids, config.data.block_slots, anchor_generator(0, index))
    packed = PackedBatch(
        index=index,
        cursor={},
        input_ids_T=torch.randint(0, VOCAB - 1, (tokens,), generator=generator),
        positions_T=positions,
        doc_ids_T=doc_ids,
        loss_mask_T=loss_mask,
        cu_seqlens_D1=cu_seqlens,
        anchors_N=anchors,
        keep_N=keep,
        documents=3,
        tokens=sum(lengths),
    )
    return HiddenBatch(packed=packed, hidden_TKH=torch.randn(tokens, FEATURES * HIDDEN, generator=generator))


def make_step(config: TrainConfig) -> TrainStep:
    return TrainStep(config, make_drafter(config), make_ends(), "cpu")


def plain_sums(config: TrainConfig, drafter: nn.Module, batch: HiddenBatch) -> tuple[LossSums, torch.Tensor]:
    """Loss sums and labelled places [N, B-1]: the oracle mask and the plain loss, one place after another.

    What each place asks, of whom, with which weight; the first place of a block is given.
    """
    packed, ends, block = batch.packed, make_ends(), config.drafter.block_size
    ids, labels, weights, positions = labels_and_weights(
        packed.input_ids_T,
        packed.positions_T,
        packed.doc_ids_T,
        packed.loss_mask_T,
        packed.anchors_N,
        packed.keep_N,
        block_size=block,
        mask_token_id=ends.mask_token_id,
        gamma=math.inf if config.loss.weighting == "dpace" else None,
    )
    hidden, final = batch.hidden_TKH[:, : FEATURES * HIDDEN], batch.hidden_TKH[:, FEATURES * HIDDEN :]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        window = config.drafter.sliding_window if layer in config.drafter.sliding_layers else None
        return attend_dense(q, k, v, dense_mask(packed.anchors_N, packed.keep_N, packed.doc_ids_T, block, window))

    states = drafter(hidden, packed.positions_T, ends.embed_VH[ids.flatten()], positions.flatten(), attend)
    source = torch.zeros_like(labels)
    for n in range(labels.shape[0]):
        for k in range(1, block):
            row = min(int(packed.anchors_N[n]) + k - 1, config.data.token_budget - 1)
            source[n, k] = row
            if config.loss.labels == "argmax" and weights[n, k] > 0:
                labels[n, k] = int((final[row] @ ends.head_VH.T).argmax())
    drafted = [x[:, 1:].flatten() for x in (labels, weights, source)]
    sums = reference_block_loss(
        states.view(-1, block, HIDDEN)[:, 1:].flatten(0, 1),
        ends.head_VH,
        drafted[0],
        drafted[1],
        teacher=Teacher(final, drafted[2], ends.head_VH) if config.loss.labels == "kl" else None,
        reweigh=dpace(block - 1, 0.5) if config.loss.weighting == "dpace" else None,
    )
    return sums, weights[:, 1:] > 0
