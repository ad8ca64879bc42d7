"""The target's cases of `cases.py`: rows that are compiled, rows in 8 bits, rows without a wait for the device."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from tests.trainer.test_targets import TEXTS, document, other_target
from trainer import torch_setup
from trainer.config import TargetConfig
from trainer.data.batch import PackedBatch
from trainer.data.packing import pack
from trainer.model.target_loading import load_target
from trainer.model.targets import Target

TOKENS = 512
ROUNDING = 5e-2
EIGHT_BITS = 0.3
"""Text in the shipped target is off by 4 %; a small dense model of random weights multiplies every error, to 18 %."""


def _row(target: Target, *texts: str) -> PackedBatch:
    documents = [document(target, text) for text in texts]
    return pack(documents, index=0, cursor={}, token_budget=TOKENS, block_slots=4, max_documents=5, run_seed=0)


def _worst_error(found: torch.Tensor, expected: torch.Tensor, layers: int) -> float:
    pairs = zip(found.float().chunk(layers, 1), expected.float().chunk(layers, 1), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def compiled_rows(device: str, *, fp8: bool) -> None:
    """The shipped hybrid and a dense model: one graph for all layers, none for other documents, the plain states.

    Those are transformers' own, of each document alone. The hybrid runs its rows in one forward, without causal-conv1d.
    """
    dtype = "float32" if device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as folder, torch_setup.thread_rules("target", device):
        dense = str(other_target("qwen3", Path(folder), hidden_size=128, head_dim=32, intermediate_size=256))
        for path in ("tiny", dense):
            common = TargetConfig(path=path, dtype=dtype, num_features=3, allow_slow_kernels=True)  # type: ignore[arg-type]  # a Literal
            plain = load_target(replace(common, packing="documents"), device)
            by_default = None if device != "cpu" else True
            target = load_target(replace(common, compile=by_default, fp8=fp8), device)
            assert target.compiled
            assert target.apart is not None
            assert target.apart.own_recurrence
            target.fix_row_length(TOKENS)
            before = torch_setup.compile_counts()
            target.warm_up()
            graphs = torch_setup.compile_counts().graphs - before.graphs
            torch_setup.forbid_compilation()
            for texts in (TEXTS, TEXTS[:1], TEXTS[::-1]):
                states = torch.full((TOKENS, 3 * target.hidden_size), float("nan"), dtype=target.dtype, device=device)
                target.hidden_states(_row(target, *texts), out=states)
                expected = plain.hidden_states(_row(plain, *texts))
                error = _worst_error(states, expected, 3)
                print(path, "fp8" if fp8 else dtype, "graphs", graphs, "error", error)
                assert error < (EIGHT_BITS if fp8 else ROUNDING)
            torch_setup.check_nothing_compiled()
            torch_setup.allow_compilation()
            assert graphs <= 8


def hybrid_rows(device: str) -> None:
    """A hybrid's packed rows, uncompiled, against transformers' own forward of each document alone.

    Its recurrence is flash-linear-attention's where that is installed. Documents shorter than the convolution, around
    a chunk, and longer; alone in their row, and together.
    """
    dtype = "float32" if device == "cpu" else "bfloat16"
    with torch_setup.thread_rules("target", device):
        common = TargetConfig(dtype=dtype, num_features=3, allow_slow_kernels=True)  # type: ignore[arg-type]  # a Literal
        plain = load_target(replace(common, packing="documents"), device)
        target = load_target(replace(common, packing="row"), device)
        assert target.apart is not None
        assert target.apart.own_recurrence
        print("recurrence", target.apart.layers[0].mixer._rule)
        for lengths in ([200], [1, 2, 3, 4, 5], [63, 64, 65], [130, 1, 70, 3]):
            bounds = [0, *itertools.accumulate(lengths)]
            generator = torch.Generator().manual_seed(sum(lengths))
            ids = torch.randint(0, target.vocab_size, (bounds[-1],), generator=generator)
            positions = torch.cat([torch.arange(length) for length in lengths])
            found = target.row_states(ids, positions, bounds)
            expected = torch.cat([plain.document_states(ids[a:b]) for a, b in itertools.pairwise(bounds)])
            error = _worst_error(found, expected, 3)
            print(lengths, "error", error)
            assert error < (1e-5 if device == "cpu" else ROUNDING)


def rows_never_wait(device: str) -> None:
    """A row is queued without one wait, a dense target's and a hybrid's."""
    with tempfile.TemporaryDirectory() as folder, torch_setup.thread_rules("target", device):
        for path in (str(other_target("qwen3", Path(folder))), "tiny"):
            target = load_target(
                TargetConfig(path=path, num_features=3, packing="row", allow_slow_kernels=True), device
            )
            packed = _row(target, *TEXTS)
            expected = target.hidden_states(packed).clone()  # pinned memory is allocated here, which may wait
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                found = target.hidden_states(packed)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(found, expected)
