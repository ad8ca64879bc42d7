"""The step with labels that the target makes, and with D-PACE weights, against the same written plainly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.small_step import (
    FEATURES,
    HIDDEN,
    VOCAB,
    make_batch,
    make_config,
    make_drafter,
    make_ends,
    make_step,
    plain_sums,
)
from trainer.config import TrainConfig
from trainer.data.batch import HiddenBatch


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


@pytest.mark.parametrize(
    ("labels", "weighting"), [("argmax", "decay"), ("kl", "decay"), ("tokens", "dpace"), ("kl", "dpace")]
)
def test_one_step_equals_the_plain_form(labels: str, weighting: str) -> None:
    """Failed with teacher rows one further on."""
    config = config_of(labels, weighting)
    step = make_step(config)
    batch = batch_of(config)
    step.load(batch)
    step.accumulate()
    drafter = make_drafter(config)
    sums, _ = plain_sums(config, drafter, batch)
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
