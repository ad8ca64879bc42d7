"""Which device plays which role, on the machine at hand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainer.config import ConfigError, TopologyConfig, TrainConfig

_DEVICE = re.compile(r"cpu|cuda:(\d+)")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What this machine has."""

    gpus: tuple[str, ...] = ()
    """Name of each CUDA device, by index."""


def probe_hardware() -> Hardware:
    """Ask torch for the CUDA devices of this process."""
    # Importing torch takes seconds, and every launch asks this first: without a device file there is no device.
    # (/dev/dxg: Windows' Linux; /dev/nvhost-*: boards without a PCI bus.)
    if not any(path.name.startswith(("nvidia", "dxg", "nvhost")) for path in Path("/dev").glob("*")):
        return Hardware()
    import torch

    if not torch.cuda.is_available():
        return Hardware()
    return Hardware(tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))


def default_topology(hardware: Hardware) -> TopologyConfig:
    """A sensible split of the devices at hand.

    A target forward of the 27B shape passes about 12,500 tokens a second on an H200 and a drafter with 512
    anchors to 4,096 tokens about 20,000 (docs/benchmarks.md), so targets get three fifths or a little more of
    the cards; a verifier gets a card of its own from four cards on, below that it shares a target's.
    """
    count = len(hardware.gpus)
    if count == 0:
        return TopologyConfig(target=("cpu",), drafter=("cpu", "cpu"), verifier=("cpu",))
    if count == 1:
        return TopologyConfig(target=("cuda:0",), drafter=("cuda:0", "cuda:0"), verifier=("cuda:0",))
    names = tuple(f"cuda:{i}" for i in range(count))
    workers = names if count < 4 else names[:-1]
    targets = max(1, min(len(workers) - 1, round(0.6 * len(workers))))
    return TopologyConfig(
        target=workers[:targets],
        drafter=workers[targets:],
        verifier=names[:1] if count < 4 else names[-1:],
    )


def check_topology(topology: TopologyConfig, hardware: Hardware) -> None:
    """Raises ConfigError when a device does not exist here."""
    count = len(hardware.gpus)
    have = "no GPU" if count == 0 else "1 GPU (cuda:0)" if count == 1 else f"{count} GPUs (cuda:0 to cuda:{count - 1})"
    for role in ("target", "drafter", "verifier"):
        for device in getattr(topology, role):
            match = _DEVICE.fullmatch(device)
            if match is None:
                raise ConfigError(f"topology.{role}: {device!r} is no device; write `cpu` or `cuda:N`")
            if match.group(1) is not None and int(match.group(1)) >= count:
                raise ConfigError(
                    f"topology.{role} names {device}, but this machine has {have}; "
                    f"choose with --set topology.{role}=..."
                )


def cpu_notes(config: TrainConfig) -> list[str]:
    """What runs otherwise than the variant says because drafters are on the CPU."""
    if any(device != "cpu" for device in config.topology.drafter):
        return []
    notes = []
    if config.attention == "flex":
        notes.append("FlexAttention has no backward on CPU; the drafters use the chunked SDPA twin, same mask")
    if config.graphs != "none":
        notes.append(f"graphs={config.graphs} needs CUDA; on CPU every step is launched as it is")
    if config.compile:
        notes.append("compile=True is for GPU drafters; on CPU the drafters run eagerly")
    if config.step.recompute == "elementwise":
        notes.append(f"step.recompute={config.step.recompute} is the compiler's; on CPU nothing is compiled")
    return notes
