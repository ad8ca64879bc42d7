"""8-bit weights for the frozen target: the decoder's linear layers, replaced where they stand.

Weights are quantised once, each output row with a scale of its own; inputs are quantised as they come, each token with
a scale of its own (`trainer.model.fp8`). Embedding, head, norms, convolutions, routers and projections with few or odd
outputs stay as they are: they cost little time and their errors would be everyone's.

Layers that read the same input (queries, keys and values; gate and up) share one quantisation of it: while a row runs,
`Tokenwise` remembers the last input and what it became.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer.config import FP8_MULTIPLE, ConfigError, TargetConfig
from trainer.model.fp8 import Scaled, quantise_rows, scaled_matmul
from trainer.model.tokenwise import Tokenwise

FIRST_CAPABILITY = (8, 9)
SMALLEST_SIDE = 64
"""A linear layer with fewer inputs or outputs is left alone."""
NEVER = ("gate", "router", "shared_expert_gate")
"""Names of layers that choose experts: an error there changes which ones are asked."""


class Fp8Linear(nn.Module):
    """A frozen linear layer whose weight is held, and multiplied, in 8 bits."""

    values: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: Scaled, bias: torch.Tensor | None, tokenwise: Tokenwise) -> None:
        super().__init__()
        self.register_buffer("values", weight.values)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("bias", bias)
        self._tokenwise = tokenwise

    @classmethod
    def of(cls, linear: nn.Linear, tokenwise: Tokenwise) -> Fp8Linear:
        """The same layer in 8 bits."""
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(quantise_rows(linear.weight.detach()), bias, tokenwise)

    @classmethod
    def joined(cls, first: Fp8Linear, second: Fp8Linear) -> Fp8Linear:
        """One layer whose outputs are those of two; the two become views of it, so nothing is held twice."""
        values, scale, bias = (_joined(first, second, name) for name in ("values", "scale", "bias"))
        assert values is not None
        assert scale is not None
        return cls(Scaled(values, scale), bias, first._tokenwise)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        # Inside a compiled function the quantisation is part of it, and nothing may be remembered.
        tracing = torch.compiler.is_dynamo_compiling()
        scaled = quantise_rows(flat) if tracing else self._tokenwise.shared(quantise_rows, x, flat)
        out = scaled_matmul(scaled, Scaled(self.values, self.scale), x.dtype, fast=True)
        out = out.view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def _joined(first: Fp8Linear, second: Fp8Linear, name: str) -> torch.Tensor | None:
    one, other = getattr(first, name), getattr(second, name)
    if one is None:
        return None
    # Not every operation knows 8-bit floats, and these are only moved.
    as_bytes = [part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in (one, other)]
    both = torch.cat(as_bytes).view(one.dtype)
    setattr(first, name, both[: len(one)])
    setattr(second, name, both[len(one) :])
    return both


def eligible(name: str, module: nn.Module) -> bool:
    """Whether this module of a decoder layer is held in 8 bits; `name` is its own, without its parents'."""
    if not isinstance(module, nn.Linear) or name in NEVER:
        return False
    sides = (module.in_features, module.out_features)
    return min(sides) >= SMALLEST_SIDE and not any(side % FP8_MULTIPLE for side in sides)


def quantise_layer(layer: nn.Module, tokenwise: Tokenwise) -> int:
    """Replace the layer's eligible linear layers; returns how many. The weights they had are free afterwards."""
    count = 0
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if eligible(name, child):
                assert isinstance(child, nn.Linear)
                setattr(parent, name, Fp8Linear.of(child, tokenwise))
                count += 1
    return count


def hold_in_8_bits(config: TargetConfig, layers: list[nn.Module], device: torch.device, tokenwise: Tokenwise) -> None:
    """Bring the decoder layers to their device and into 8 bits, one after the other: at most one is held twice.

    Raises ConfigError where the device or the model cannot.
    """
    if device.type == "cuda":
        if config.dtype != "bfloat16":
            raise ConfigError("target.fp8 on a GPU needs target.dtype=bfloat16: its products give bfloat16")
        capability = torch.cuda.get_device_capability(device)
        if capability < FIRST_CAPABILITY:
            raise ConfigError(
                f"target.fp8 needs a GPU of compute capability 8.9 or newer; {device} has "
                f"{capability[0]}.{capability[1]}; leave target.fp8 off"
            )
    replaced = sum(quantise_layer(layer.to(device), tokenwise) for layer in layers)
    if replaced == 0:
        raise ConfigError(
            f"target.fp8: no linear layer of {config.path} has {SMALLEST_SIDE} or more inputs and outputs in multiples "
            f"of {FP8_MULTIPLE}, which 8-bit products need; leave target.fp8 off"
        )


def eight_bit_parameters(layers: list[nn.Module]) -> int:
    """How many parameters `quantise_layer` would hold in 8 bits."""
    return sum(
        child.weight.numel()
        for layer in layers
        for parent in layer.modules()
        for name, child in parent.named_children()
        if eligible(name, child) and isinstance(child, nn.Linear)
    )
