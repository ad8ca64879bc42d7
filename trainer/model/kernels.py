"""Whether a hybrid target's fast kernels are there.

transformers picks the kernels of a GatedDeltaNet layer at import: flash-linear-attention and causal-conv1d where they
can be imported, else its own PyTorch loops, which are correct and many times slower. Nothing but a warning tells the
two apart, so the trainer asks before it moves a weight.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

import torch

LINEAR_ATTENTION = "linear_attention"
"""The layer type that needs them, in a transformers configuration's `layer_types`."""
KERNELS = {"fla.ops.gated_delta_rule": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
"""Module -> the distribution that holds it."""


def missing_kernels(import_module: Callable[[str], object] = importlib.import_module) -> list[str]:
    """Distributions whose kernels cannot be imported; one that is installed and broken counts as missing."""
    missing = []
    for module, distribution in KERNELS.items():
        try:
            import_module(module)
        except Exception as error:  # noqa: BLE001  # a wheel built for another torch fails in many ways
            missing.append(f"{distribution} ({type(error).__name__}: {error})")
    return missing


def slow_kernel_reason(
    layer_types: Iterable[str],
    device: torch.device,
    missing: Callable[[], list[str]] = missing_kernels,
) -> str | None:
    """Why this target would run on slow kernels on this device, and what to do; None where it would not."""
    if device.type != "cuda" or LINEAR_ATTENTION not in layer_types:
        return None
    absent = missing()
    if not absent:
        return None
    return (
        f"the target has GatedDeltaNet layers and their GPU kernels are missing: {'; '.join(absent)}. Install "
        "flash-linear-attention and causal-conv1d (set TORCH_CUDA_ARCH_LIST to this card when building), or ask for "
        "the slow run by name: --set target.allow_slow_kernels=true"
    )
