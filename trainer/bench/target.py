"""The target stage against transformers' own forward of the same model: time, share of the ceiling, memory, parts.

Ours is the forward that a run makes: packed rows, stopped after the last captured layer, states written side by side
into one buffer. The other is what one writes without this trainer: the whole text body (all layers, final norm, no
head, no cache) on documents of one length as a batch, attention through SDPA. Both run in turn, on the same inputs.

FLOPs of a forward are 2 for each weight of a linear layer and token, and 4 * heads * head_dim * (S + 1) / 2 for each
token of a document of S in every layer that attends (scores and their product with the values, causal). GatedDeltaNet's
recurrence, convolutions and everything elementwise are not counted. For the 27B shape with S = 4096 that is 49.5 GFLOP
a token over all 64 layers.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainer import torch_setup
from trainer.bench.drafter import Kinds, kernel_parts
from trainer.bench.measure import BenchError, Timing, time_alternately
from trainer.config import TargetConfig
from trainer.data.batch import PackedBatch
from trainer.model.target_loading import load_target
from trainer.model.target_models import text_body
from trainer.model.targets import Target

TOKENS = {"27b": 8192, "8b": 8192, "tiny": 1024}
"""Tokens of one row where none are asked for."""
INPUT_SETS = 3
TOLERANCE = 5e-2
"""Of bf16 states, relative; or twice what transformers' own differ by between two sizes of a batch, if that is more:
sixty layers of random weights amplify a rounding that far."""
FP8_TOLERANCE = 0.5
"""8-bit states are off by what the result says; beyond this they are something else."""
KINDS: Kinds = (
    ("compiled", ("triton_",)),  # first: Inductor names a kernel after all that is fused in it
    # FlashAttention's template arguments hold the word cutlass, so attention comes before the products.
    ("attention", ("flash", "fmha", "sdpa", "attention")),
    ("gdn", ("gated_delta", "chunk_", "solve_tril", "merge_16x16", "recompute_w_u", "l2norm", "cumsum", "conv")),
    ("gemm", ("gemm", "nvjet", "cutlass", "cublas", "sm90_xmma", "wgmma", "scaled_mm")),
    ("copies", ("memcpy", "memset", "copy", "catarray")),
    ("elementwise", ("elementwise", "reduce", "softmax")),
)


@dataclass(frozen=True, slots=True)
class TargetResult:
    """One configuration's figures; `plain_` is transformers' own forward."""

    shape: str
    tokens: int
    documents: int
    packing: str
    compiled: bool
    """target.compile."""
    fp8: bool
    """target.fp8; the other side is not."""
    layers: int
    """Layers that ours runs."""
    plain_layers: int
    warm_up_s: float
    graphs: int
    """Graphs compiled for ours."""
    tokens_per_s: float
    plain_tokens_per_s: float
    speedup: float
    ms: float
    spread_ms: float
    """Slowest less fastest repeat."""
    plain_ms: float
    plain_spread_ms: float
    gflop_per_token: float
    """Executed; see the module's docstring for what is counted."""
    plain_gflop_per_token: float
    tflops: float
    """Executed FLOPs over time."""
    plain_tflops: float
    of_ceiling: float
    plain_of_ceiling: float
    peak_gb: float
    """Weights included."""
    plain_peak_gb: float
    relative_error: dict[str, float]
    """Of each captured layer's states, norm over norm, the worst input set."""
    plain_noise: dict[str, float]
    """The same between transformers' own states of a document in a batch of two sizes: what rounding alone does."""
    parts: dict[str, float] = field(default_factory=dict)
    """GPU milliseconds of one call by kind of kernel."""
    plain_parts: dict[str, float] = field(default_factory=dict)


def bench_target(
    name: str,
    documents: int,
    *,
    tokens: int | None = None,
    packing: str = "auto",
    compile: bool = False,
    fp8: bool = False,
    ceiling: float,
    device: torch.device,
    repeats: int = 12,
    profile: bool = False,
) -> TargetResult:
    """Measure one configuration; call it on a thread that entered `thread_rules`.

    Raises BenchError for a shape that does not fit this machine, TargetError for a target that cannot run so.
    """
    tokens = TOKENS[name] if tokens is None else tokens
    if device.type == "cpu" and name != "tiny":
        raise BenchError(
            f"bench target --shape {name} needs a CUDA device: its weights alone are tens of gigabytes and a forward "
            "takes minutes on a CPU; use --shape tiny here"
        )
    if documents < 1 or tokens % documents or tokens // documents < 2:
        raise BenchError(f"{tokens} tokens cannot be split into {documents} equal documents; change --tokens")
    torch.manual_seed(0)  # random weights: the same for both models
    target = load_target(target_config(name, packing, device, compile=compile, fp8=fp8), device)
    other = target
    if fp8:
        torch.manual_seed(0)
        other = load_target(target_config(name, "documents", device), device)
    rows = [equal_documents(target, tokens, documents, index) for index in range(INPUT_SETS)]
    length = tokens // documents
    plain = PlainForward(other, documents)
    began, before = time.perf_counter(), torch_setup.compile_counts()
    target.fix_row_length(tokens)
    target.warm_up()
    warm_up_s, graphs = time.perf_counter() - began, torch_setup.compile_counts().graphs - before.graphs
    out = torch.empty(tokens, target.num_features * target.hidden_size, dtype=target.dtype, device=device)

    def ours(index: int) -> None:
        target.hidden_states(rows[index % INPUT_SETS], out=out)

    def theirs(index: int) -> None:
        plain.run(rows[index % INPUT_SETS])

    noise = batch_noise(plain, rows[0])
    errors = compare(target, plain, rows, out, noise)
    timing, plain_timing = time_alternately([ours, theirs], device, repeats=repeats)
    layers, all_layers = target.layer_ids[-1] + 1, target.num_layers
    flops = forward_flops(other.model, layers, length) * tokens
    plain_flops = forward_flops(other.model, all_layers, length) * tokens
    on_gpu = device.type == "cuda"
    return TargetResult(
        shape=name,
        tokens=tokens,
        documents=documents,
        packing=target.packing,
        compiled=compile,
        fp8=fp8,
        layers=layers,
        plain_layers=all_layers,
        warm_up_s=warm_up_s,
        graphs=graphs,
        tokens_per_s=_rate(tokens, timing),
        plain_tokens_per_s=_rate(tokens, plain_timing),
        speedup=plain_timing.median_ms / timing.median_ms,
        ms=timing.median_ms,
        spread_ms=timing.worst_ms - timing.best_ms,
        plain_ms=plain_timing.median_ms,
        plain_spread_ms=plain_timing.worst_ms - plain_timing.best_ms,
        gflop_per_token=flops / tokens / 1e9,
        plain_gflop_per_token=plain_flops / tokens / 1e9,
        tflops=_rate(flops, timing) / 1e12,
        plain_tflops=_rate(plain_flops, plain_timing) / 1e12,
        of_ceiling=_rate(flops, timing) / 1e12 / ceiling,
        plain_of_ceiling=_rate(plain_flops, plain_timing) / 1e12 / ceiling,
        peak_gb=_peak_gb(ours, device, beside=other.model if fp8 else None),
        plain_peak_gb=_peak_gb(theirs, device, beside=target.model if fp8 else None),
        relative_error=errors,
        plain_noise=dict(zip(map(str, target.layer_ids), noise, strict=True)),
        parts=kernel_parts(ours, kinds=KINDS) if profile and on_gpu else {},
        plain_parts=kernel_parts(theirs, kinds=KINDS) if profile and on_gpu else {},
    )


def target_config(
    name: str, packing: str, device: torch.device, *, compile: bool = False, fp8: bool = False
) -> TargetConfig:
    """The measured target's settings."""
    return TargetConfig(
        path="tiny" if name == "tiny" else f"shape:{name}",
        dtype="bfloat16" if device.type == "cuda" else "float32",
        allow_slow_kernels=True,  # the comparison is with a forward that has the same kernels
        packing=packing,  # type: ignore[arg-type]  # the command line offers these words alone
        compile=compile,
        fp8=fp8,
    )


class PlainForward:
    """transformers' forward of the target's whole text body, on a batch of equal documents."""

    def __init__(self, target: Target, documents: int) -> None:
        self._body = text_body(target.model)
        self._config: Any = self._body.config
        self._documents = documents
        self._layer_ids = target.layer_ids
        self._device = target.device

    def run(self, packed: PackedBatch) -> Any:
        """The model's output."""
        return self._forward(packed.input_ids_T.view(self._documents, -1), states=False)

    @torch.no_grad()
    def _forward(self, ids_DS: torch.Tensor, *, states: bool) -> Any:
        ours = self._config._attn_implementation
        self._config._attn_implementation = "sdpa"
        try:
            return self._body(input_ids=ids_DS.to(self._device), use_cache=False, output_hidden_states=states)
        finally:
            self._config._attn_implementation = ours

    def captured(self, packed: PackedBatch) -> list[torch.Tensor]:
        """[T, H] of each captured layer."""
        return self.captured_batch(packed.input_ids_T.view(self._documents, -1))

    def captured_batch(self, ids_DS: torch.Tensor) -> list[torch.Tensor]:
        """[D * S, H] of each captured layer."""
        found = self._forward(ids_DS, states=True).hidden_states
        return [found[layer + 1].flatten(0, 1) for layer in self._layer_ids]


def batch_noise(plain: PlainForward, packed: PackedBatch) -> list[float]:
    """By captured layer: how far the first document's states are off between a batch of one and the largest here."""
    ids_DS = packed.input_ids_T.view(packed.documents, -1)
    alone = plain.captured_batch(ids_DS[:1])
    among = plain.captured_batch(ids_DS if packed.documents > 1 else ids_DS.repeat(2, 1))
    return [_relative(many[: ids_DS.shape[1]], one) for one, many in zip(alone, among, strict=True)]


def compare(
    target: Target, plain: PlainForward, rows: list[PackedBatch], out: torch.Tensor, noise: list[float]
) -> dict[str, float]:
    """Relative error of every captured layer over all rows; `out` is poisoned before each, `noise` is `batch_noise`'s.

    Raises BenchError where an element was not written or the states are not the same.
    """
    worst = [0.0] * len(target.layer_ids)
    width = target.hidden_size
    for packed in rows:
        out.fill_(float("nan"))
        target.hidden_states(packed, out=out)
        for place, expected_TH in enumerate(plain.captured(packed)):
            error = _relative(out[:, place * width : (place + 1) * width], expected_TH)
            if not math.isfinite(error):
                raise BenchError(f"layer {target.layer_ids[place]}: some states were never written, or are not finite")
            worst[place] = max(worst[place], error)
    base = 1e-4 if target.dtype == torch.float32 else TOLERANCE
    allowed = [FP8_TOLERANCE if target.fp8 else max(base, 2 * between) for between in noise]
    found = dict(zip(map(str, target.layer_ids), worst, strict=True))
    if any(error > most for error, most in zip(worst, allowed, strict=True)):
        raise BenchError(
            f"the states differ from transformers' own: relative error by layer {found}, where {allowed} is allowed"
        )
    return found


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def forward_flops(model: Any, layers: int, document_tokens: int) -> float:
    """FLOPs a token of the first `layers` decoder layers; what counts is in the module's docstring."""
    config = model.config.get_text_config()
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    total = 0.0
    for layer in text_body(model).layers[:layers]:
        total += 2.0 * sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear))
        if hasattr(layer, "self_attn"):
            total += 4.0 * width * (document_tokens + 1) / 2
    return total


def equal_documents(target: Target, tokens: int, documents: int, index: int) -> PackedBatch:
    """A row of random tokens without padding, `documents` documents of the same length."""
    generator = torch.Generator().manual_seed(index)
    length = tokens // documents
    return PackedBatch(
        index=index,
        cursor={},
        input_ids_T=torch.randint(0, target.vocab_size, (tokens,), generator=generator),
        positions_T=torch.arange(length).repeat(documents),
        doc_ids_T=torch.arange(documents, dtype=torch.int32).repeat_interleave(length),
        loss_mask_T=torch.ones(tokens, dtype=torch.bool),
        cu_seqlens_D1=torch.arange(documents + 1, dtype=torch.int32) * length,
        anchors_N=torch.zeros(1, dtype=torch.int32),
        keep_N=torch.zeros(1, dtype=torch.bool),
        documents=documents,
        tokens=tokens,
    )


def _rate(amount: float, timing: Timing) -> float:
    return amount / (timing.median_ms * 1e-3)


def _peak_gb(work: Callable[[int], None], device: torch.device, beside: Any) -> float:
    """Peak memory of one call, less the weights of another model that is there only for the comparison."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work(0)
    torch.cuda.synchronize(device)
    tensors = itertools.chain(beside.parameters(), beside.buffers()) if beside is not None else ()
    held: int = sum(x.numel() * x.element_size() for x in tensors)
    return float(torch.cuda.max_memory_allocated(device) - held) / 1e9
