"""Variants and devices: whole configurations by name, checked against the machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ConfigError, TopologyConfig
from trainer.topology import Hardware, check_topology, cpu_notes, default_topology
from trainer.variants import VARIANTS, config_for

NOTHING = Hardware()


def gpus(count: int) -> Hardware:
    return Hardware(tuple(f"GPU {i}" for i in range(count)))


@pytest.mark.parametrize(
    ("name", "attention", "graphs", "compiled", "target_compiled"),
    [
        ("threadwarm", "flex", "step", True, None),
        ("flex", "flex", "none", True, None),
        ("graphwarm", "flex", "compiler", True, None),
        ("sdpa", "sdpa", "none", False, False),
    ],
)
def test_the_table_of_variants(
    name: str, attention: str, graphs: str, compiled: bool, target_compiled: bool | None
) -> None:
    """None: the target is compiled where the machine and the model allow it."""
    config = config_for(name, {}, NOTHING)
    assert (config.variant, config.attention, config.graphs, config.compile) == (name, attention, graphs, compiled)
    assert config.target.compile is target_compiled
    assert VARIANTS[name].__doc__


def test_an_unknown_variant_lists_them_all() -> None:
    with pytest.raises(ConfigError) as caught:
        config_for("nonsense", {}, NOTHING)
    assert all(name in str(caught.value) for name in VARIANTS)
    with pytest.raises(ConfigError, match="did you mean threadwarm"):
        config_for("thredwarm", {}, NOTHING)


def test_overrides_win_over_recipe_and_variant() -> None:
    config = config_for("threadwarm", {"graphs": "none", "optim.lr": "0.5", "topology.drafter": "cpu,cpu,cpu"}, NOTHING)
    assert config.graphs == "none"
    assert config.optim.lr == 0.5
    assert config.topology.drafter == ("cpu", "cpu", "cpu")


def test_a_real_target_gets_the_full_recipe() -> None:
    config = config_for("flex", {"target.path": "shape:27b"}, gpus(8))
    assert config.data.token_budget == 49152
    assert config.drafter.num_layers == 5
    assert config.target.path == "shape:27b"


class TestTopology:
    @given(count=st.integers(0, 16))
    def test_every_default_fits_its_machine_and_fills_every_role(self, count: int) -> None:
        topology = default_topology(gpus(count))
        check_topology(topology, gpus(count))
        assert topology.target
        assert topology.drafter
        assert topology.verifier
        used = {*topology.target, *topology.drafter, *topology.verifier}
        assert len(used) == max(count, 1)
        if count > 1:
            assert not set(topology.target) & set(topology.drafter)

    def test_one_gpu_runs_every_role(self) -> None:
        topology = default_topology(gpus(1))
        assert topology == TopologyConfig(target=("cuda:0",), drafter=("cuda:0", "cuda:0"), verifier=("cuda:0",))

    @pytest.mark.parametrize(
        ("count", "device", "message"),
        [
            (0, "cuda:0", "this machine has no GPU"),
            (1, "cuda:1", r"1 GPU \(cuda:0\)"),
            (2, "cuda:3", "cuda:0 to cuda:1"),
            (2, "gpu1", "write `cpu` or `cuda:N`"),
            (2, "cuda", "write `cpu` or `cuda:N`"),
            (2, "cuda:1 ", "write `cpu` or `cuda:N`"),
        ],
    )
    def test_a_device_that_does_not_exist(self, count: int, device: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            check_topology(TopologyConfig(drafter=(device,), verifier=()), gpus(count))

    def test_a_wrong_device_is_refused_through_the_command_line_too(self) -> None:
        with pytest.raises(ConfigError, match=r"topology\.drafter names cuda:0"):
            config_for("sdpa", {"topology.drafter": "cuda:0"}, NOTHING)


def test_what_a_cpu_does_otherwise_is_said_once_and_only_where_it_matters() -> None:
    assert any("FlexAttention has no backward on CPU" in note for note in cpu_notes(config_for("flex", {}, NOTHING)))
    assert cpu_notes(config_for("sdpa", {}, NOTHING)) == []
    assert cpu_notes(config_for("threadwarm", {}, gpus(1))) == []
