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
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainer import torch_setup
from trainer.bench.drafter import Kinds, kernel_parts
from trainer.bench.measure import BenchError, Timing, time_alternately
from trainer.config import TargetConfig
from trainer.data.batch import PackedBatch
from trainer.model.gated_delta import TORCH_RULE, torch_rule
from trainer.model.target_loading import load_target
from trainer.model.target_models import text_body
from trainer.model.targets import Target

TOKENS = {"27b": 8192, "8b": 8192, "tiny": 1024}
"""Tokens of one row where none are asked for."""
INPUT_SETS = 3
ROUNDING = 1.5
"""Our states may be so many times as far from fp32 ones as transformers' own in the same type are."""
EXACT = 1e-4
"""How far states of an fp32 target may be off, relative."""
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
    difference: dict[str, float]
    """Of each captured layer's states from transformers' own, norm over norm, the worst input set. Both round, and
    sixty layers of random weights amplify every rounding."""
    error: dict[str, float]
    """Of ours from those of an fp32 forward, one document."""
    plain_error: dict[str, float]
    """Of transformers' own from those."""
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

    difference = compare(target, plain, rows, out)
    error, plain_error = against_fp32(target, plain, rows[0], out)
    check_rounding(target, error, plain_error)
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
        difference=difference,
        error=error,
        plain_error=plain_error,
        parts=kernel_parts(ours, kinds=KINDS) if profile and on_gpu else {},
        plain_parts=kernel_parts(theirs, kinds=KINDS) if profile and on_gpu else {},
    )


def target_config(
    name: str, packing: str, device: torch.device, *, compile: bool | None = False, fp8: bool = False
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
        return self._forward(self._batch(packed), states=False)

    def _batch(self, packed: PackedBatch) -> torch.Tensor:
        """Token ids [D, S]."""
        return packed.input_ids_T.view(self._documents, -1)

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
        return self._captured(self._batch(packed))

    def in_fp32(self, packed: PackedBatch) -> list[torch.Tensor]:
        """[S, H] of each captured layer, of the first document, computed in fp32 from the weights as they are.

        One layer at a time is widened, so that no second model need fit; recurrences run in plain torch.
        """
        with ExitStack() as stack:
            stack.enter_context(_plain_recurrence(self._body))
            for module in (self._body.embed_tokens, *self._body.layers, self._body.norm):
                stack.enter_context(_widened(module))
            return self._captured(self._batch(packed)[:1])

    def _captured(self, ids_DS: torch.Tensor) -> list[torch.Tensor]:
        found = self._forward(ids_DS, states=True).hidden_states
        return [found[layer + 1].flatten(0, 1) for layer in self._layer_ids]


@contextmanager
def _widened(module: Any) -> Iterator[None]:
    """Inside, every call of this module has fp32 weights, which are gone after it."""
    kept: dict[str, torch.Tensor] = {}

    def widen(module: nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            kept[name] = parameter.data
            parameter.data = parameter.data.float()

    def narrow(module: nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.data = kept.pop(name)

    hooks = [
        module.register_forward_pre_hook(widen),
        module.register_forward_hook(narrow, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _plain_recurrence(body: Any) -> Iterator[None]:
    """Inside, transformers' GatedDeltaNet runs its PyTorch recurrence: kernels are made for 16 bits."""
    mixers = [layer.linear_attn for layer in body.layers if hasattr(layer, "linear_attn")]
    owner = sys.modules[type(mixers[0]).__module__] if mixers else None
    before = getattr(owner, TORCH_RULE, None)
    if before is not None:
        setattr(owner, TORCH_RULE, torch_rule(mixers[0]))
    try:
        yield
    finally:
        if before is not None:
            setattr(owner, TORCH_RULE, before)


def compare(target: Target, plain: PlainForward, rows: list[PackedBatch], out: torch.Tensor) -> dict[str, float]:
    """How far every captured layer is from transformers' own over all rows; `out` is poisoned before each.

    Raises BenchError where an element was not written.
    """
    worst = [0.0] * len(target.layer_ids)
    for packed in rows:
        found = _ours(target, packed, out)
        for place, (got_TH, expected_TH) in enumerate(zip(found, plain.captured(packed), strict=True)):
            off = _relative(got_TH, expected_TH)
            if not math.isfinite(off):
                raise BenchError(f"layer {target.layer_ids[place]}: some states were never written, or are not finite")
            worst[place] = max(worst[place], off)
    return dict(zip(map(str, target.layer_ids), worst, strict=True))


def against_fp32(
    target: Target, plain: PlainForward, packed: PackedBatch, out: torch.Tensor
) -> tuple[dict[str, float], dict[str, float]]:
    """(ours, transformers' own): how far the first document's states are from an fp32 forward's, by layer."""
    exact = plain.in_fp32(packed)
    length = exact[0].shape[0]
    both = [
        [_relative(got_TH[:length], want_TH) for got_TH, want_TH in zip(states, exact, strict=True)]
        for states in (_ours(target, packed, out), plain.captured(packed))
    ]
    names = [str(layer) for layer in target.layer_ids]
    return dict(zip(names, both[0], strict=True)), dict(zip(names, both[1], strict=True))


def check_rounding(target: Target, error: dict[str, float], plain_error: dict[str, float]) -> None:
    """Raises BenchError where our states are off by more than rounding; 8-bit ones are off by what the result says."""
    base = EXACT if target.dtype == torch.float32 else 0.0
    allowed = {layer: max(base, ROUNDING * off) for layer, off in plain_error.items()}
    if not target.fp8 and any(off > allowed[layer] for layer, off in error.items()):
        raise BenchError(
            f"the states are further from an fp32 forward's than rounding explains: by layer {error}, where "
            f"{allowed} is allowed and transformers' own are off by {plain_error}"
        )


def _ours(target: Target, packed: PackedBatch, out: torch.Tensor) -> list[torch.Tensor]:
    """[T, H] of each captured layer."""
    out.fill_(float("nan"))
    target.hidden_states(packed, out=out)
    return list(out.chunk(target.num_features, dim=1))


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
