"""The refusal of a hybrid target without its GPU kernels. Seen to fail with the device test left out."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from trainer.config import TargetConfig
from trainer.model.kernels import missing_kernels, slow_kernel_reason
from trainer.model.target_layers import rows_keep_documents_apart
from trainer.model.target_models import TargetError, decoder_layers, random_model

HYBRID = ["linear_attention", "linear_attention", "full_attention"]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def none_there(name: str) -> object:
    raise ImportError(f"No module named {name!r}")


def test_each_missing_distribution_is_named_with_its_error() -> None:
    found = missing_kernels(own_convolution=False, import_module=none_there)
    assert [text.split(" ")[0] for text in found] == ["flash-linear-attention", "causal-conv1d"]
    assert all("No module named" in text for text in found)
    assert missing_kernels(own_convolution=False, import_module=lambda name: object()) == []
    assert len(missing_kernels(own_convolution=True, import_module=none_there)) == 1


@pytest.mark.parametrize(
    ("layers", "device", "missing"),
    [(HYBRID, GPU, []), (HYBRID, CPU, ["causal-conv1d"]), (["full_attention"], GPU, ["causal-conv1d"])],
)
def test_nothing_to_say_where_nothing_is_slow(layers: list[str], device: torch.device, missing: list[str]) -> None:
    reason = slow_kernel_reason(layers, device, own_convolution=False, missing=lambda **_: missing)
    assert reason is None


def test_a_hybrid_on_a_gpu_without_kernels_is_told_the_fix_and_the_way_around() -> None:
    gone = ["causal-conv1d (ImportError: gone)"]
    reason = slow_kernel_reason(HYBRID, GPU, own_convolution=False, missing=lambda **_: gone)
    assert reason is not None
    for part in ("causal-conv1d (ImportError: gone)", "TORCH_CUDA_ARCH_LIST", "target.allow_slow_kernels=true"):
        assert part in reason


def test_layers_with_our_own_convolution_ask_for_one_package() -> None:
    """Failed while both were asked for."""

    def missing(*, own_convolution: bool) -> list[str]:
        return missing_kernels(own_convolution=own_convolution, import_module=none_there)

    reason = slow_kernel_reason(HYBRID, GPU, own_convolution=True, missing=missing)
    assert reason is not None
    assert "flash-linear-attention" in reason
    assert "conv1d" not in reason


@pytest.mark.parametrize(("packing", "words"), [("row", "Install flash-linear-attention, or"), ("documents", "conv1d")])
def test_a_published_shape_asks_for_what_its_packing_needs(packing: Literal["row", "documents"], words: str) -> None:
    """Refused before a weight is made, so this runs without a GPU; documents run transformers' own forward."""
    if not missing_kernels(own_convolution=True):
        pytest.skip("the kernels are here")
    with pytest.raises(TargetError, match=words):
        random_model(TargetConfig(path="shape:27b", packing=packing), GPU)


def test_the_layers_of_the_published_hybrid_shapes_are_known() -> None:
    """What the refusal takes for granted of them."""
    model, _ = random_model(TargetConfig(path="shape:1b"), torch.device("meta"))
    assert rows_keep_documents_apart(decoder_layers(model))
