"""SpecForge's DFlash training step on the same shapes and the same machine, for a ratio.

The package is installed without its dependencies into a folder of its own: its pins (torch, transformers, sglang) would
replace what the trainer runs on. Its step needs only torch and transformers.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.bench.measure import BenchError, time_work
from trainer.bench.shapes import SHAPES, BenchShape, model_flops

SPECFORGE = "specforge==0.2.0"


class PeerUnavailable(BenchError):
    """The peer could not be installed or imported; says what to do."""


@dataclass(frozen=True, slots=True)
class PeerResult:
    """One configuration of the peer."""

    peer: str
    shape: str
    documents: int
    compiled: str
    """`flex`: its default, FlexAttention alone; `whole`: its whole draft model under torch.compile."""
    warm_up_s: float
    step_ms: float
    spread_ms: float
    sequences_per_s: float
    tflops: float
    of_ceiling: float
    peak_gb: float
    first_loss: float


def install(folder: Path) -> None:
    """Put the peer into `folder` and on the import path. Raises PeerUnavailable."""
    if not (folder / "specforge").is_dir():
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), SPECFORGE],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise PeerUnavailable(
                f"{SPECFORGE} could not be installed into {folder}: {done.stderr.strip()[-200:]}; unpack "
                "its wheel there, or check the network"
            )
    sys.path.insert(0, str(folder))


def make_peer(shape: BenchShape, device: torch.device, *, whole: bool) -> tuple[nn.Module, Any]:
    """(its training model, its optimizer), bf16 weights with fp32 masters, as its own scripts build them."""
    from transformers import Qwen3Config

    try:
        from specforge.algorithms.common.dflash_family_model import (  # type: ignore[import-not-found]  # installed at run time
            OnlineDFlashModel,
        )
        from specforge.modeling.draft.dflash import DFlashDraftModel  # type: ignore[import-not-found]  # as above
        from specforge.optimizer import BF16Optimizer  # type: ignore[import-not-found]  # as above
    except ImportError as error:
        raise PeerUnavailable(f"{SPECFORGE} does not import beside this torch and transformers: {error}") from error

    mine = shape.drafter
    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        num_hidden_layers=mine.num_layers,
        num_attention_heads=mine.num_heads,
        num_key_value_heads=mine.num_kv_heads,
        head_dim=mine.head_dim,
        intermediate_size=mine.intermediate_size,
        vocab_size=shape.vocab_size,
        max_position_embeddings=65536,
    )
    config.block_size = mine.block_size
    config.num_target_layers = 64
    config.dflash_config = {
        "target_layer_ids": list(range(1, shape.features + 1)),
        "mask_token_id": shape.vocab_size - 1,
    }
    config._attn_implementation = "flex_attention"
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            draft = DFlashDraftModel(config)
            embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
            head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        finally:
            torch.set_default_dtype(default)
    embed.requires_grad_(False)
    head.requires_grad_(False)
    optimizer = BF16Optimizer(draft, lr=6e-4, max_grad_norm=1.0, total_steps=10000, warmup_ratio=0.04)
    model = OnlineDFlashModel(
        torch.compile(draft) if whole else draft,
        head,
        embed,
        shape.vocab_size - 1,
        block_size=mine.block_size,
        attention_backend="flex_attention",
        num_anchors=shape.anchors,
        loss_decay_gamma=7.0,
    )
    return model, optimizer


def bench_peer(
    name: str, documents: int, *, whole: bool, ceiling: float, device: torch.device, repeats: int = 12
) -> PeerResult:
    """Measure one configuration of the peer: `documents` sequences of the shape's length, its own anchor sampling."""
    shape = SHAPES[name]
    model, optimizer = make_peer(shape, device, whole=whole)
    generator = torch.Generator(device).manual_seed(0)
    size = (documents, shape.document_tokens)
    batches = [
        (
            torch.randint(0, shape.vocab_size - 1, size, device=device, generator=generator),
            torch.randn(*size, shape.features * shape.hidden_size, device=device, generator=generator).bfloat16(),
            torch.ones(size, dtype=torch.long, device=device),
        )
        for _ in range(2)
    ]
    losses: list[torch.Tensor] = []

    def step(index: int) -> None:
        loss, _, _ = model(*batches[index % 2])
        loss.backward()
        optimizer.step()
        if not losses:
            losses.append(loss.detach())

    began = time.perf_counter()
    step(0)
    step(1)
    torch.cuda.synchronize(device)
    warm_up_s = time.perf_counter() - began
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    timing = time_work(step, device, repeats=repeats)
    tflops = model_flops(shape, documents) / (timing.median_ms * 1e-3) / 1e12
    return PeerResult(
        peer=SPECFORGE,
        shape=name,
        documents=documents,
        compiled="whole" if whole else "flex",
        warm_up_s=warm_up_s,
        step_ms=timing.median_ms,
        spread_ms=timing.worst_ms - timing.best_ms,
        sequences_per_s=documents / (timing.median_ms * 1e-3),
        tflops=tflops,
        of_ceiling=tflops / ceiling,
        peak_gb=torch.cuda.max_memory_allocated(device) / 1e9,
        first_loss=float(losses[0]),
    )
