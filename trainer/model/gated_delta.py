"""GatedDeltaNet of the frozen target over a packed row: every document by itself, in one pass of each kernel.

transformers' own forward needs causal-conv1d to keep packed documents apart, and without it runs a slow convolution
between two transposes. Here everything around the recurrence is two functions of a row's tokens, compiled where the
row is (tokenwise.py) and shared by all layers:

* `enter`: the causal depthwise convolution as one multiply-add for each tap, in fp32, where a tap before the start of
  the token's own document counts as zero; SiLU; L2-normalised queries and keys; decay and step size.
* `leave`: the gated norm and the output projection.

The recurrence between them is flash-linear-attention's on a GPU, with the row's bounds and with queries and keys that
are not repeated for their groups of value heads. Elsewhere it is transformers' PyTorch function, document by document.

Shape legend: T tokens of the row, D documents, C convolved channels, W taps, h key heads, v value heads.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trainer.model.target_fp8 import Fp8Linear
from trainer.model.tokenwise import Tokenwise

CHUNK = 64
"""Tokens that flash-linear-attention's kernels take at a time."""
NORM_EPS = 1e-6
"""Of queries and keys; flash-linear-attention and transformers both hold it fixed."""
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
PARTS = {*PROJECTIONS, "conv1d", "norm", "out_proj"}
FUSED_RULE = "fla.ops.gated_delta_rule"
TORCH_RULE = "torch_chunk_gated_delta_rule"

_fused_lock = threading.Lock()
"""flash-linear-attention keeps what it computes from bounds in queues of the process, unguarded: a thread that looks
one up while another adds to it dies. So does one that tries out a kernel's forms while another launches it: Triton's
autotuner keeps the arguments of the call under way in itself, and drops them at its end. Launches do not wait for their
kernels, so the turns are short."""


@dataclass(frozen=True, slots=True)
class RowBounds:
    """A packed row's documents as its recurrent layers need them, made once a row."""

    bounds: list[int]
    place_T: torch.Tensor
    """int32: each token's index inside its document."""
    cu_seqlens_D1: torch.Tensor
    """int32: `bounds` on the device."""
    chunks_N2: torch.Tensor
    """int32: (document, chunk inside it) of each chunk. Left to the kernels, every row waits for the device here."""

    @classmethod
    def of(cls, bounds: list[int], upload: Callable[[torch.Tensor], torch.Tensor]) -> RowBounds:
        """Documents [bounds[i], bounds[i+1]); `upload` brings a tensor to the device."""
        cu_seqlens_D1 = torch.tensor(bounds, dtype=torch.int32)
        lengths_D = cu_seqlens_D1.diff()
        _, place_T = _numbered(lengths_D)
        chunks_N2 = torch.stack(_numbered((lengths_D + CHUNK - 1) // CHUNK), dim=1)
        return cls(bounds, upload(place_T), upload(cu_seqlens_D1), upload(chunks_N2))


def _numbered(counts_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Group, and index inside the group, of every member of groups of these sizes; int32."""
    group_N = torch.arange(len(counts_D), dtype=torch.int32).repeat_interleave(counts_D)
    first_N = (counts_D.cumsum(0) - counts_D).repeat_interleave(counts_D)
    return group_N, (torch.arange(len(group_N)) - first_N).int()


class _Here(threading.local):
    row: RowBounds | None = None


_here = _Here()


@contextmanager
def recurrent_row(row: RowBounds | None) -> Iterator[None]:
    """Recurrent layers of this thread run this row."""
    before, _here.row = _here.row, row
    try:
        yield
    finally:
        _here.row = before


class Entry(nn.Module):
    """What `enter` needs, nothing else: the compiled function guards on what it is given.

    The small weights are held once more, in fp32 and each tap in a row of its own: read as transformers holds them,
    side by side, they keep Inductor from making queries and keys in one pass.
    """

    taps_WC: torch.Tensor
    bias_C: torch.Tensor | None
    rate_v: torch.Tensor
    shift_v: torch.Tensor

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        bias = mixer.conv1d.bias
        self.register_buffer("taps_WC", mixer.conv1d.weight[:, 0].t().float().contiguous())
        self.register_buffer("bias_C", None if bias is None else bias.float())
        self.register_buffer("rate_v", -mixer.A_log.float().exp())
        self.register_buffer("shift_v", mixer.dt_bias.float())
        self.key_heads, self.value_heads = int(mixer.num_k_heads), int(mixer.num_v_heads)
        self.key_dim, self.value_dim = int(mixer.head_k_dim), int(mixer.head_v_dim)


Entered = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def enter(entry: Entry, qkv: torch.Tensor, steps: torch.Tensor, place_T: torch.Tensor) -> Entered:
    """q and k [1, T, h, K], value [1, T, v, V], decay in log space (fp32) and beta, both [1, T, v].

    `qkv` [1, T, C] and `steps` [1, T, 2v] are what the projections gave; q and k are normalised, not scaled.
    """
    split = entry.key_heads * entry.key_dim
    # One convolution each: q and k are normalised as they are made, and a joint result would go through memory.
    heads = (1, -1, entry.key_heads, entry.key_dim)
    q = _unit(_convolved(entry, qkv, place_T, slice(0, split)).view(heads))
    k = _unit(_convolved(entry, qkv, place_T, slice(split, 2 * split)).view(heads))
    value = _convolved(entry, qkv, place_T, slice(2 * split, None))
    b, a = steps.chunk(2, dim=-1)
    decay = entry.rate_v * F.softplus(a.float() + entry.shift_v)
    value = value.view(1, -1, entry.value_heads, entry.value_dim)
    return q.to(qkv.dtype), k.to(qkv.dtype), value.to(qkv.dtype), decay, b.sigmoid().contiguous()


def _convolved(entry: Entry, qkv: torch.Tensor, place_T: torch.Tensor, channels: slice) -> torch.Tensor:
    """SiLU of the causal convolution of some channels, fp32 [1, T, channels], documents kept apart."""
    x, taps = qkv[..., channels], entry.taps_WC[:, channels]
    out = x * taps[-1]
    for back in range(1, len(taps)):
        earlier = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        out = out + torch.where((place_T >= back)[:, None], earlier, 0) * taps[-1 - back]
    if entry.bias_C is not None:
        out = out + entry.bias_C[channels]
    return F.silu(out)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def leave(norm: nn.Module, out_proj: nn.Module, core: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """The layer's output [1, T, H] from the recurrence's [1, T, v, V] and the gate z [1, T, v * V]."""
    normed = norm(core.flatten(0, 2), z.reshape(-1, core.shape[-1]))
    return out_proj(normed.view_as(z))  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


class GatedDelta(nn.Module):
    """A shell of a GatedDeltaNet module for rows inside `recurrent_row`; shares every weight with it."""

    def __init__(self, mixer: Any, tokenwise: Tokenwise) -> None:
        super().__init__()
        self.entry = Entry(mixer)
        self.in_proj_qkv, self.in_proj_z = mixer.in_proj_qkv, mixer.in_proj_z
        self.in_proj_steps = joined(mixer.in_proj_b, mixer.in_proj_a)
        self.norm, self.out_proj = mixer.norm, mixer.out_proj
        self._tokenwise = tokenwise
        self._rule = _fused_rule() if mixer.A_log.is_cuda else None
        self._plain_rule = torch_rule(mixer)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        row = _here.row
        assert row is not None, "a GatedDelta layer runs inside of recurrent_row only"
        qkv, z = self.in_proj_qkv(hidden_states), self.in_proj_z(hidden_states)
        steps = self.in_proj_steps(hidden_states)
        entered = self._tokenwise(enter, self.entry, qkv, steps, row.place_T)
        del qkv, steps  # half a gigabyte in a long row, not needed while the recurrence makes its own
        core = self._fused(row, *entered) if self._rule is not None else self._by_document(row, *entered)
        del entered
        return self._tokenwise(leave, self.norm, self.out_proj, core, z)  # type: ignore[no-any-return]  # as above

    def _fused(
        self, row: RowBounds, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        assert self._rule is not None
        with _fused_lock:
            out, _ = self._rule(
                q, k, v, g, beta, cu_seqlens=row.cu_seqlens_D1, chunk_indices=row.chunks_N2, chunk_size=CHUNK
            )
        return out  # type: ignore[no-any-return]  # the library is untyped

    def _by_document(
        self, row: RowBounds, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        group = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
        parts = [
            self._plain_rule(q[:, a:b], k[:, a:b], v[:, a:b], g=g[:, a:b], beta=beta[:, a:b])[0]
            for a, b in itertools.pairwise(row.bounds)
        ]
        return torch.cat(parts, dim=1)


def in_turns(mixer: nn.Module) -> None:
    """Have transformers' own forward of this mixer wait for its turn: decoding, and documents one by one, run it."""

    def begin(*_: Any) -> None:
        _fused_lock.acquire()

    def end(*_: Any) -> None:
        _fused_lock.release()

    mixer.register_forward_pre_hook(begin)
    mixer.register_forward_hook(end, always_call=True)


def joined(first: Any, second: Any) -> nn.Module:
    """One linear layer for two of the same size; the two become views of it, so nothing is held twice."""
    if isinstance(first, Fp8Linear):
        return Fp8Linear.joined(first, second)
    both = nn.Linear(first.in_features, 2 * first.out_features, bias=first.bias is not None, device="meta")
    for name in ("weight", *(("bias",) if first.bias is not None else ())):
        values = torch.cat([getattr(first, name).detach(), getattr(second, name).detach()])
        setattr(both, name, nn.Parameter(values, requires_grad=False))
        for part, view in zip((first, second), values.chunk(2), strict=True):
            setattr(part, name, nn.Parameter(view, requires_grad=False))
    return both


def unknown_recurrence(mixer: Any) -> str | None:
    """Why `GatedDelta` cannot stand for this module; None where it can (the trial at load compares the numbers)."""
    if set(mixer._modules) - {"act"} != PARTS:
        return f"{type(mixer).__name__} has the parts {', '.join(sorted(mixer._modules))}"
    sizes = [getattr(mixer, name, 0) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")]
    key_heads, value_heads, key_dim, value_dim = sizes
    if not all(sizes) or value_heads % key_heads:
        return f"{type(mixer).__name__} has {key_heads} and {value_heads} heads of {key_dim} and {value_dim}"
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    conv = mixer.conv1d
    if (conv.in_channels, conv.out_channels, conv.groups) != (channels,) * 3 or (conv.stride, conv.dilation) != (
        (1,),
        (1,),
    ):
        return f"its convolution is {conv}"
    if mixer.activation != "silu" or not type(mixer.norm).__module__.startswith("transformers."):
        return f"its activation is {mixer.activation}, its norm a {type(mixer.norm).__name__}"
    if mixer.A_log.shape != (value_heads,) or mixer.dt_bias.shape != (value_heads,):
        return "it does not have one decay for each value head"
    return None if torch_rule(mixer) is not None else f"its module has no {TORCH_RULE}"


def torch_rule(mixer: Any) -> Any:
    """transformers' PyTorch recurrence beside this module, without what chooses a kernel in front of it."""
    found = getattr(sys.modules[type(mixer).__module__], TORCH_RULE, None)
    return None if found is None else inspect.unwrap(found)


def _fused_rule() -> Any:
    """flash-linear-attention's recurrence; None where it cannot be imported (target.allow_slow_kernels)."""
    try:
        return importlib.import_module(FUSED_RULE).chunk_gated_delta_rule
    except Exception:  # noqa: BLE001  # a wheel built for another torch fails in many ways; kernels.py has said so
        return None
