"""From hosts.yaml's roles to the trainer's devices and their memory, on machines of 1, 2, 4 and 8 H200.

The device table was recorded on an idle H200 machine (tests/fixtures/nvidia-smi); larger ones repeat its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_ops import hosts
from dflash_ops.agent.nvidia_smi import parse_cards
from dflash_ops.errors import HostsFileError
from dflash_ops.launch import target_overrides
from trainer import collectives
from trainer.collectives import choose
from trainer.config import ConfigError, TrainConfig
from trainer.memory import check_memory, needs
from trainer.model.target_models import TargetFacts
from trainer.topology import Hardware, default_topology
from trainer.variants import config_for

RECORDED = Path(__file__).parents[1] / "fixtures" / "nvidia-smi" / "h200_x2_gpus_idle.csv"
FACTS_27B = TargetFacts(parameters=26_900_000_000, hidden_size=5120, vocab_size=248320, features=5)
"""About 54 GB in bf16."""


@dataclass(frozen=True)
class Table:
    """What a machine shows."""

    hardware: Hardware
    free: dict[str, int]


def table(count: int) -> Table:
    cards, _ = parse_cards(RECORDED.read_text())
    cards = [cards[i % len(cards)] for i in range(count)]
    free = {
        f"cuda:{i}": int(((card.memory_total_mib or 0) - (card.samples[0].memory_mib or 0)) * 2**20)
        for i, card in enumerate(cards)
    }
    return Table(Hardware(tuple(card.name for card in cards)), free)


def from_hosts(count: int, roles: str, machine: Table, **settings: str) -> TrainConfig:
    """The configuration that `fab launch` on a host with these roles hands to the trainer there."""
    text = f"""
default: box
targets:
  box:
    via: local
    root: /tmp/dflash
    gpus: {{count: {count}, roles: {roles}}}
"""
    overrides = target_overrides(hosts.parse(text, "hosts.yaml").targets["box"])
    given = {key.replace("__", "."): value for key, value in settings.items()}
    return config_for("threadwarm", {"target.path": "shape:27b", **overrides, **given}, machine.hardware)


@pytest.mark.parametrize(
    ("count", "roles", "drafters", "how"),
    [
        (2, "{target: [0], drafter: [1]}", ("cuda:1",), "peer"),
        (4, "{target: [0, 1], drafter: [2, 3]}", ("cuda:2", "cuda:3"), "nccl"),
        (4, "{target: [0, 1, 2], drafter: [3]}", ("cuda:3",), "peer"),
        (8, "{target: [0, 1], drafter: [2, 3, 4], verifier: [5, 6, 7]}", ("cuda:2", "cuda:3", "cuda:4"), "nccl"),
        (8, "{target: [0, 1, 2, 3], drafter: [4, 5, 6], verifier: [7]}", ("cuda:4", "cuda:5", "cuda:6"), "nccl"),
        (8, "{target: [0, 1, 2, 3, 4], drafter: [5, 6, 7]}", ("cuda:5", "cuda:6", "cuda:7"), "nccl"),
    ],
)
def test_the_reference_splits_fit_with_the_published_recipe(
    count: int, roles: str, drafters: tuple[str, ...], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """49,152 context tokens a row. Seen to fail with cards of 80 GB."""
    monkeypatch.setattr(collectives, "nccl_built", lambda: True)
    machine = table(count)
    config = from_hosts(count, roles, machine)
    assert config.topology.drafter == drafters
    assert config.data.token_budget == 49_152
    check_memory(config, FACTS_27B, machine.free)
    topology = config.topology
    others = (*topology.target, *(topology.verifier or topology.target[:1]))
    assert choose(config.run.exchange, topology.drafter, others) == how


@pytest.mark.parametrize("count", [2, 4, 8])
def test_what_is_chosen_without_roles_fits_too(count: int) -> None:
    machine = table(count)
    config = config_for("threadwarm", {"target.path": "shape:27b"}, machine.hardware)
    assert config.topology == default_topology(machine.hardware)
    check_memory(config, FACTS_27B, machine.free)


class TestRefusals:
    def test_a_drafter_beside_a_verifier_with_its_target_names_both_and_the_figures(self) -> None:
        machine = table(4)
        config = from_hosts(4, "{target: [0, 1], drafter: [2, 3], verifier: [3]}", machine)
        with pytest.raises(
            ConfigError,
            match=r"^drafter1 on cuda:3 and its neighbours need about 17\d\.\d GB, 150\.8 free \(target 6\d\.\d, "
            r"drafter1 10\d\.\d, gradient exchange 0\.\d, verifier0 \d\.\d\)\. Spread the roles",
        ):
            check_memory(config, FACTS_27B, machine.free)

    def test_a_drafter_alone_on_a_smaller_card(self) -> None:
        """The sentence of a role that has its card to itself has no neighbours in it."""
        machine = table(2)
        config = from_hosts(2, "{target: [0], drafter: [1]}", machine)
        with pytest.raises(ConfigError, match=r"^drafter0 on cuda:1 needs about 10\d\.\d GB, 80\.0 free\. Spread"):
            check_memory(config, FACTS_27B, machine.free | {"cuda:1": 80_000_000_000})

    def test_one_card_is_too_small_for_all_roles_at_the_published_size_and_enough_at_a_small_one(self) -> None:
        machine = table(1)
        everything = "{target: [0], drafter: [0], verifier: [0]}"
        with pytest.raises(ConfigError, match=r"cuda:0 and its neighbours need about .* 150\.8 free"):
            check_memory(from_hosts(1, everything, machine), FACTS_27B, machine.free)
        small = from_hosts(1, everything, machine, data__token_budget="8192", data__block_slots="1024")
        check_memory(small, FACTS_27B, machine.free)

    def test_roles_beyond_the_machines_cards(self) -> None:
        """hosts.yaml speaks of eight, the machine has four: the trainer says so before it loads anything."""
        with pytest.raises(ConfigError, match=r"topology\.drafter names cuda:4, but this machine has 4 GPUs"):
            from_hosts(8, "{target: [0, 1], drafter: [2, 3, 4], verifier: [5, 6, 7]}", table(4))

    def test_roles_beyond_the_count(self) -> None:
        with pytest.raises(HostsFileError, match="roles name GPU 4, but count is 4: the last is 3"):
            from_hosts(4, "{target: [0, 1], drafter: [2, 3, 4]}", table(4))


def test_the_exchange_counts_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "nccl_built", lambda: True)

    def exchange(count: int, roles: str, **settings: str) -> list[float]:
        config = from_hosts(count, roles, table(count), **settings)
        return [need.bytes / 1e9 for need in needs(config, FACTS_27B) if need.role.startswith("gradient exchange")]

    assert exchange(2, "{target: [0], drafter: [1]}") == []
    by_nccl = exchange(4, "{target: [0, 1], drafter: [2, 3]}")
    by_peers = exchange(4, "{target: [0, 1], drafter: [2, 3]}", run__exchange="peer")
    assert len(by_nccl) == len(by_peers) == 2
    assert by_peers[0] == pytest.approx(0.27, abs=0.02)
    assert by_nccl[0] == pytest.approx(by_peers[0] + 0.6)
