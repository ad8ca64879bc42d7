"""Memory estimates by role and device, before anything loads. Seen to fail with the verifier's target left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.saved_tensors import saved_tensors
from trainer.bench.shapes import SHAPES, bench_config
from trainer.config import ConfigError, DataConfig, StepConfig, TargetConfig, TopologyConfig, TrainConfig
from trainer.memory import check_memory, drafter_parameters, kept_for_backward, needs
from trainer.model.target_models import TargetFacts, weigh

FACTS_27B = TargetFacts(parameters=26_900_000_000, hidden_size=5120, vocab_size=248320, features=5)
H200 = 140_000_000_000


def config(target: tuple[str, ...], drafter: tuple[str, ...], verifier: tuple[str, ...]) -> TrainConfig:
    return TrainConfig(
        variant="threadwarm",
        data=DataConfig(token_budget=4 * 4096, block_slots=4 * 512),
        topology=TopologyConfig(target=target, drafter=drafter, verifier=verifier),
    )


def step_alone(config: TrainConfig) -> int:
    """Bytes of a drafter that hands no weights to verifiers: any but the first."""
    topology = replace(config.topology, drafter=(*config.topology.drafter, "cuda:9"))
    found = {need.role: need.bytes for need in needs(replace(config, topology=topology), FACTS_27B)}
    return found["drafter1 on cuda:9"]


def test_the_drafter_of_a_27b_target_has_1_73_billion_parameters() -> None:
    assert drafter_parameters(config(("cuda:0",), ("cuda:1",), ()), FACTS_27B) == pytest.approx(1.73e9, rel=1e-3)


def test_a_drafters_need_is_what_was_measured() -> None:
    """55.0 GB at 4 x 4096 tokens on an H200, two spare batches of 0.84 GB among them (docs/benchmarks.md)."""
    apart = config(("cuda:0",), ("cuda:1",), ())
    found = {need.role: need.bytes for need in needs(apart, FACTS_27B)}
    assert step_alone(apart) / 1e9 == pytest.approx(55.0 - 1.7, rel=0.03)
    assert found["target on cuda:0"] / 1e9 == pytest.approx(55, rel=0.05)


@pytest.mark.parametrize(
    ("step", "most"),
    [
        (StepConfig(recompute="none"), 61.5),
        (StepConfig(), 54.2),
        (StepConfig(recompute="elementwise", recompute_mlps=2), 49.6),
        (StepConfig(fp8=True), 57.5),
        (StepConfig(fp8=True, recompute_mlps=5), 48.5),
    ],
)
def test_the_estimate_knows_what_the_steps_options_save(step: StepConfig, most: float) -> None:
    plain = config(("cuda:0",), ("cuda:1",), ())
    assert most - 2 < step_alone(replace(plain, step=step)) / 1e9 < most


@pytest.mark.parametrize(
    "step",
    [
        StepConfig(recompute="none"),
        StepConfig(recompute="elementwise", recompute_mlps=1),
        StepConfig(fp8=True, recompute="none", recompute_mlps=2),
        StepConfig(fp8=True, recompute="elementwise"),
    ],
    ids=["plain", "recompute", "fp8", "both"],
)
def test_what_backward_keeps_is_what_the_compilers_own_split_keeps(step: StepConfig) -> None:
    """The formula against a trace of the real drafter. Failed with SwiGLU's product left out of `none`, and with the
    repeated MLPs counted all the same.
    """
    shape = SHAPES["tiny"]
    traced = saved_tensors(shape, 1, in_8_bits=step.fp8, recompute=step.recompute, recompute_mlps=step.recompute_mlps)
    made = bench_config(shape, 1, attention="flex", graphs="none", device=torch.device("cuda"))
    facts = TargetFacts(1, shape.hidden_size, shape.vocab_size, shape.features)
    # Statistics of norms and softmax, a thousandth at 27B, weigh more where heads are 32 wide.
    assert kept_for_backward(replace(made, step=step), facts) == pytest.approx(sum(traced.values()), rel=0.08)


def test_a_device_of_its_own_for_each_role_fits_and_one_for_all_does_not() -> None:
    spread = config(("cuda:0",), ("cuda:1", "cuda:2"), ("cuda:3",))
    check_memory(spread, FACTS_27B, {f"cuda:{i}": H200 for i in range(4)})
    crowded = config(("cuda:0",), ("cuda:0", "cuda:0"), ("cuda:0",))
    with pytest.raises(ConfigError, match=r"on cuda:0.*GB, 140\.0 free.*target 5\d\.\d.*drafter0.*topology"):
        check_memory(crowded, FACTS_27B, {"cuda:0": H200})


def test_the_device_that_is_too_small_is_named() -> None:
    spread = config(("cuda:0",), ("cuda:1",), ("cuda:2",))
    free = {"cuda:0": H200, "cuda:1": 24_000_000_000, "cuda:2": H200}
    with pytest.raises(ConfigError, match=r"drafter0 on cuda:1.*24\.0 free"):
        check_memory(spread, FACTS_27B, free)


def test_a_verifier_elsewhere_holds_a_target_too() -> None:
    roles = {need.role for need in needs(config(("cuda:0",), ("cuda:1",), ("cuda:2",)), FACTS_27B)}
    assert {"target on cuda:0", "target on cuda:2"} <= roles
    assert not needs(config(("cpu",), ("cpu",), ("cpu",)), FACTS_27B)


def test_the_first_drafter_holds_the_weights_that_are_evaluated() -> None:
    """A copy for each verifier, and one that waits."""
    for verifiers in (("cuda:2",), ("cuda:2", "cuda:3"), ()):
        made = config(("cuda:0",), ("cuda:1", "cuda:4"), verifiers)
        first, second = (need for need in needs(made, FACTS_27B) if need.role.startswith("drafter"))
        copies = 1 + max(1, len(verifiers))
        assert first.bytes - second.bytes == copies * 2 * drafter_parameters(made, FACTS_27B)


@pytest.mark.parametrize(("path", "least", "most"), [("tiny", 1e6, 2e7), ("shape:27b", 25e9, 29e9)])
def test_a_target_is_weighed_without_loading_it(path: str, least: float, most: float) -> None:
    facts = weigh(replace(TargetConfig(), path=path))
    assert least < facts.parameters < most
    assert facts.features == 5
