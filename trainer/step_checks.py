"""What a training step asks of its configuration and device before it builds anything."""

from __future__ import annotations

import torch

from trainer.config import ConfigError, TrainConfig
from trainer.model.drafter import Drafter
from trainer.model.fp8 import ALIGNMENT


def check_options(config: TrainConfig, drafter: Drafter, device: torch.device) -> None:
    """Raises ConfigError for an option of `step.*` that this drafter or device cannot follow."""
    layers = drafter.shape.config.num_layers
    if config.step.recompute_mlps > layers:
        raise ConfigError(f"step.recompute_mlps is {config.step.recompute_mlps}, but the drafter has {layers} layers")
    if config.step.recompute != "none" and device.type == "cuda" and not config.compile:
        raise ConfigError(
            f"step.recompute={config.step.recompute} is carried out by the compiler, and compile=false: set "
            "compile=true, or use step.recompute_mlps alone"
        )
    if config.step.fp8:
        check_fp8(config, drafter, device)


def check_fp8(config: TrainConfig, drafter: Drafter, device: torch.device) -> None:
    """Raises ConfigError where step.fp8 cannot run: sizes that 8-bit products refuse, or a GPU without them."""
    shape, own = drafter.shape, drafter.shape.config
    sizes = {
        "the target's hidden size": shape.hidden_size,
        "drafter.num_heads * head_dim": own.num_heads * own.head_dim,
        "drafter.num_kv_heads * head_dim": own.num_kv_heads * own.head_dim,
        "drafter.intermediate_size": own.intermediate_size,
        "data.token_budget": config.data.token_budget,
        "data.block_slots * drafter.block_size": config.data.block_slots * own.block_size,
    }
    bad = [f"{name} is {size}" for name, size in sizes.items() if size % ALIGNMENT]
    if bad:
        raise ConfigError(f"step.fp8 needs multiples of {ALIGNMENT}: {', '.join(bad)}; change them or leave it off")
    if device.type != "cuda":
        return
    if config.target.dtype != "bfloat16":
        raise ConfigError("step.fp8 on a GPU needs target.dtype=bfloat16: its products give bfloat16")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise ConfigError(
            f"step.fp8 needs a GPU of compute capability 8.9 or newer; {device} has {capability[0]}.{capability[1]}"
        )
