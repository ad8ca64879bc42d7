"""Whether a hybrid target's fast kernels are there.

The recurrence of a GatedDeltaNet layer is flash-linear-attention's where it can be imported, else a PyTorch loop, which
is correct and many times slower. Where the layer runs transformers' own forward, its convolution is a choice of the
same kind: causal-conv1d, or one of torch's that is slow. Nothing but a warning tells the two apart, so the trainer asks
before it moves a weight.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

import torch

LINEAR_ATTENTION = "linear_attention"
"""The layer type that needs them, in a transformers configuration's `layer_types`."""
RECURRENCE = {"fla.ops.gated_delta_rule": "flash-linear-attention"}
CONVOLUTION = {"causal_conv1d": "causal-conv1d"}
"""Module -> the distribution that holds it."""


def missing_kernels(
    *, own_convolution: bool, import_module: Callable[[str], object] = importlib.import_module
) -> list[str]:
    """Distributions whose kernels cannot be imported; one that is installed and broken counts as missing.

    `own_convolution`: the layers run in gated_delta.py, which has a convolution of its own.
    """
    missing = []
    for module, distribution in (RECURRENCE if own_convolution else RECURRENCE | CONVOLUTION).items():
        try:
            import_module(module)
        except Exception as error:  # noqa: BLE001  # a wheel built for another torch fails in many ways
            missing.append(f"{distribution} ({type(error).__name__}: {error})")
    return missing


def slow_kernel_reason(
    layer_types: Iterable[str],
    device: torch.device,
    *,
    own_convolution: bool,
    missing: Callable[..., list[str]] = missing_kernels,
) -> str | None:
    """Why this target would run on slow kernels on this device, and what to do; None where it would not."""
    if device.type != "cuda" or LINEAR_ATTENTION not in layer_types:
        return None
    absent = missing(own_convolution=own_convolution)
    if not absent:
        return None
    advice = (
        "flash-linear-attention"
        if own_convolution
        else "flash-linear-attention and causal-conv1d (set TORCH_CUDA_ARCH_LIST to this card when building)"
    )
    return (
        f"the target has GatedDeltaNet layers and their GPU kernels are missing: {'; '.join(absent)}. Install "
        f"{advice}, or ask for the slow run by name: --set target.allow_slow_kernels=true"
    )
