"""What a training step asks of its configuration and device before it builds anything."""

from __future__ import annotations

import torch

from trainer.config import FP8_MULTIPLE, ConfigError, TrainConfig
from trainer.model.drafter import Drafter


def check_options(config: TrainConfig, drafter: Drafter, device: torch.device) -> None:
    """Raises ConfigError for an option of `step.*` that this drafter or device cannot follow."""
    if config.step.recompute == "elementwise" and device.type == "cuda" and not config.step_compiled:
        raise ConfigError(
            "step.recompute=elementwise is carried out by the compiler, and this run's step is not compiled: set "
            "compile=true with attention=flex, or use step.recompute_mlps alone"
        )
    if config.step.fp8:
        check_fp8(config, drafter, device)


def check_fp8(config: TrainConfig, drafter: Drafter, device: torch.device) -> None:
    """Raises ConfigError where step.fp8 cannot run: a target of an unfit width, or a GPU without 8-bit products."""
    hidden = drafter.shape.hidden_size
    if hidden % FP8_MULTIPLE:
        raise ConfigError(
            f"step.fp8 needs multiples of {FP8_MULTIPLE}: the target's hidden size is {hidden}; leave it off here"
        )
    if device.type != "cuda":
        return
    if config.target.dtype != "bfloat16":
        raise ConfigError("step.fp8 on a GPU needs target.dtype=bfloat16: its products give bfloat16")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise ConfigError(
            f"step.fp8 needs a GPU of compute capability 8.9 or newer; {device} has {capability[0]}.{capability[1]}"
        )
