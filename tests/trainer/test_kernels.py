"""The refusal of a hybrid target without its GPU kernels. Seen to fail with the device test left out."""

from __future__ import annotations

import pytest
import torch

from trainer.model.kernels import missing_kernels, slow_kernel_reason

HYBRID = ["linear_attention", "linear_attention", "full_attention"]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def none_there(name: str) -> object:
    raise ImportError(f"No module named {name!r}")


def test_each_missing_distribution_is_named_with_its_error() -> None:
    found = missing_kernels(none_there)
    assert [text.split(" ")[0] for text in found] == ["flash-linear-attention", "causal-conv1d"]
    assert all("No module named" in text for text in found)
    assert missing_kernels(lambda name: object()) == []


@pytest.mark.parametrize(
    ("layers", "device", "missing"),
    [(HYBRID, GPU, []), (HYBRID, CPU, ["causal-conv1d"]), (["full_attention"], GPU, ["causal-conv1d"])],
)
def test_nothing_to_say_where_nothing_is_slow(layers: list[str], device: torch.device, missing: list[str]) -> None:
    assert slow_kernel_reason(layers, device, lambda: missing) is None


def test_a_hybrid_on_a_gpu_without_kernels_is_told_the_fix_and_the_way_around() -> None:
    reason = slow_kernel_reason(HYBRID, GPU, lambda: ["causal-conv1d (ImportError: gone)"])
    assert reason is not None
    for part in ("causal-conv1d (ImportError: gone)", "TORCH_CUDA_ARCH_LIST", "target.allow_slow_kernels=true"):
        assert part in reason
