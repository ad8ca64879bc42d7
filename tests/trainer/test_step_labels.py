"""The step with labels that the target makes, and with D-PACE weights, against the same written plainly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.test_step import FEATURES, HIDDEN, VOCAB, make_batch, make_config, make_drafter, make_ends
from trainer.config import TrainConfig
from trainer.data.batch import HiddenBatch
from trainer.model.anchors import labels_and_weights
from trainer.model.loss import LossSums, Teacher, dpace, reference_block_loss
from trainer.model.mask import attend_sdpa
from trainer.step import TrainStep


def config_of(labels: str, weighting: str) -> TrainConfig:
    config = make_config()
    loss: Any = replace(config.loss, labels=labels, weighting=weighting)  # type: ignore[arg-type]  # parametrised
    return replace(config, loss=loss)


def batch_of(config: TrainConfig) -> HiddenBatch:
    batch = make_batch(config, 3)
    if config.loss.labels == "tokens":
        return batch
    final = torch.randn(config.data.token_budget, HIDDEN, generator=torch.Generator().manual_seed(8))
    return replace(batch, hidden_TKH=torch.cat((batch.hidden_TKH, final), dim=1))


def plain(config: TrainConfig, batch: HiddenBatch, drafter: torch.nn.Module) -> LossSums:
    """One place after another: what each asks, of whom, with which weight."""
    packed, ends, block = batch.packed, make_ends(), config.drafter.block_size
    ids, labels, weights, at = labels_and_weights(
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
    attend = attend_sdpa(packed.anchors_N, packed.keep_N, packed.doc_ids_T, make_drafter(config).shape)
    states = drafter(hidden, packed.positions_T, ends.embed_VH[ids.flatten()], at.flatten(), attend)
    source = torch.zeros_like(labels)
    for n in range(labels.shape[0]):
        for k in range(1, block):
            row = min(int(packed.anchors_N[n]) + k - 1, config.data.token_budget - 1)
            source[n, k] = row
            if config.loss.labels == "argmax" and weights[n, k] > 0:
                labels[n, k] = int((final[row] @ ends.head_VH.T).argmax())
    drafted = [x[:, 1:].flatten() for x in (labels, weights, source)]
    return reference_block_loss(
        states.view(-1, block, HIDDEN)[:, 1:].flatten(0, 1),
        ends.head_VH,
        drafted[0],
        drafted[1],
        teacher=Teacher(final, drafted[2], ends.head_VH) if config.loss.labels == "kl" else None,
        reweigh=dpace(block - 1, 0.5) if config.loss.weighting == "dpace" else None,
    )


@pytest.mark.parametrize(
    ("labels", "weighting"), [("argmax", "decay"), ("kl", "decay"), ("tokens", "dpace"), ("kl", "dpace")]
)
def test_one_step_equals_the_plain_form(labels: str, weighting: str) -> None:
    """Failed with teacher rows one further on."""
    config = config_of(labels, weighting)
    step = TrainStep(config, make_drafter(config), make_ends(), "cpu")
    batch = batch_of(config)
    step.load(batch)
    step.accumulate()
    drafter = make_drafter(config)
    sums = plain(config, batch, drafter)
    sums.numerator.backward()  # type: ignore[no-untyped-call]  # torch leaves backward unannotated
    assert float(step.stats[0]) == pytest.approx(float(sums.numerator.detach()), rel=1e-4)
    assert float(step.stats[1]) == pytest.approx(float(sums.denominator), rel=1e-5)
    assert float(step.stats[2]) == float(sums.correct)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        got = step.layout.views(step.grads)[name]
        assert torch.allclose(got, parameter.grad, atol=2e-4, rtol=1e-3), name


def test_labels_by_the_target_are_not_those_of_the_text() -> None:
    """The case above would pass with labels ignored if both agreed."""
    batch = batch_of(config_of("argmax", "decay"))
    final = batch.hidden_TKH[:, FEATURES * HIDDEN :]
    said = (final @ make_ends().head_VH.T).argmax(-1)[:-1]
    assert (said == batch.packed.input_ids_T[1:]).float().mean() < 0.2
    assert said.max() < VOCAB
