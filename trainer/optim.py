"""AdamW on fp32 master weights, over one flat buffer, without a host synchronisation.

Everything that changes from step to step (learning rate, bias correction, clipping, the number of the step) lives in
device tensors, so that the whole update can be captured in a CUDA graph and replayed.

The update is Loshchilov and Hutter's decoupled weight decay (arXiv 1711.05101) with Adam's bias correction; clipping is
by the global norm, as torch.nn.utils.clip_grad_norm_ does it.

Shape legend: P elements of the flat buffer (all parameters, each padded to a multiple of ALIGN).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.config import OptimConfig
from trainer.halves import joined, split

ALIGN = 64
"""Every parameter starts at a multiple of this many elements: 128 bytes in bf16, what vector loads and TMA want."""
CHUNK = 1 << 22
"""Elements that the uncompiled update handles at once, so that its temporaries stay small."""


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where each parameter lies in the flat buffer."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    total: int
    """P."""

    @classmethod
    def of(cls, module: nn.Module) -> FlatLayout:
        """The layout of a module's trainable parameters, in their order."""
        named = [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
        offsets, total = [], 0
        for _, shape in named:
            offsets.append(total)
            total += -(-math.prod(shape) // ALIGN) * ALIGN
        return cls(tuple(n for n, _ in named), tuple(s for _, s in named), tuple(offsets), total)

    def views(self, flat_P: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every parameter as a view of a flat buffer."""
        return {
            name: flat_P[offset : offset + math.prod(shape)].view(shape)
            for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)
        }

    def joined(self, flat_P: torch.Tensor, names: Sequence[str]) -> torch.Tensor | None:
        """Matrices that follow each other in the buffer as one, rows below rows; None where padding lies between."""
        where = [self.names.index(name) for name in names]
        start = end = self.offsets[where[0]]
        rows, columns = 0, self.shapes[where[0]][-1]
        for at in where:
            if self.offsets[at] != end or len(self.shapes[at]) != 2 or self.shapes[at][1] != columns:
                return None
            rows += self.shapes[at][0]
            end += math.prod(self.shapes[at])
        return flat_P[start:end].view(rows, columns)


def flatten_parameters(module: nn.Module, dtype: torch.dtype, device: torch.device) -> tuple[FlatLayout, torch.Tensor]:
    """Move a module's trainable parameters into one flat buffer; returns the layout and the buffer [P].

    The values are taken over in fp32 by the caller's choice of `dtype`: build the module in fp32 and the master
    weights lose nothing.
    """
    layout = FlatLayout.of(module)
    flat_P = torch.zeros(layout.total, dtype=dtype, device=device)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, view in layout.views(flat_P).items():
            view.copy_(parameters[name])
            parameters[name].data = view
    return layout, flat_P


def schedule(step: torch.Tensor, config: OptimConfig, total_steps: int) -> torch.Tensor:
    """Learning rate of the update that makes step `step` + 1: linear warm-up, then cosine to lr * min_lr_ratio.

    `step` is a 0-dimensional tensor counting finished updates; the result is float64 on its device.
    """
    warmup = round(config.warmup_ratio * total_steps)
    done = step.to(torch.float64)
    rising = (done + 1) / max(1, warmup)
    progress = ((done - warmup) / max(1, total_steps - warmup)).clamp(0.0, 1.0)
    falling = config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + torch.cos(math.pi * progress))
    return config.lr * torch.where(done < warmup, rising, falling)


def adamw_update(
    weights_P: torch.Tensor,
    rest_P: torch.Tensor | None,
    mean_P: torch.Tensor,
    square_P: torch.Tensor,
    grads_P: torch.Tensor,
    scalars: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One element-wise pass: read the gradient, write both moments, the master weight and the working weight.

    `weights_P` is the fp32 master itself, or with `rest_P` the bit patterns of the bf16 working weights (int16) and
    what is missing from them: see `trainer.halves`; the sign of `square_P` then holds the last bit. `scalars` is fp32
    [5]: gradient scale, weight decay factor, lr / (1 - beta1^t), 1 / (1 - beta2^t), and whether to update at all (1)
    or to write back what was there (0). Without the update nothing changes, not even by a NaN gradient.
    """
    scale, decay, rate, unbias, update = (scalars[i] for i in range(5))
    old_square, old_master = (square_P, weights_P) if rest_P is None else _whole(weights_P, rest_P, square_P)
    grad = grads_P.float() * scale
    # One product in each sum, so that there is one way to contract them to a multiply-add. With two, it depends on how
    # many elements a thread has which one is rounded; that is tuned by the clock, and replicas on several devices would
    # drift apart (measured: 10 % of the second moments off in their last bit).
    mean = mean_P + (1 - beta1) * (grad - mean_P)
    square = old_square + (1 - beta2) * (grad * grad - old_square)
    master = old_master * decay - rate * mean / (torch.sqrt(square * unbias) + eps)
    go = update > 0
    mean_P.copy_(torch.where(go, mean, mean_P))
    square, master = torch.where(go, square, old_square), torch.where(go, master, old_master)
    if rest_P is None:
        square_P.copy_(square)
        weights_P.copy_(master)
    else:
        _store(master, square, weights_P, rest_P, square_P)


def _whole(weights: torch.Tensor, rest: torch.Tensor, square: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(second moment, master weight), fp32, from how they are held."""
    bits = square.view(torch.int32)
    master = joined(weights, rest, (bits >> 31) & 1)
    return (bits & 0x7FFFFFFF).view(torch.float32), master.view(torch.float32)


def _store(
    master: torch.Tensor, square: torch.Tensor, weights: torch.Tensor, rest: torch.Tensor, into_square: torch.Tensor
) -> None:
    """The inverse of `_whole`, into the last three."""
    working, low, kept = split(master.view(torch.int32))
    weights.copy_(working)
    rest.copy_(low)
    # As bits: a code generator may take -x for 0 - x, and then zero has no sign.
    into_square.copy_((square.view(torch.int32) | (kept << 31)).view(torch.float32))


class FlatAdamW:
    """Master weights, moments and step count of one drafter, and the update of all of them.

    `weights_P` (working precision) and `grads_P` belong to the caller and share the layout. `master_P` is the fp32
    weights to start from. It is `weights_P` itself where that is the working precision; where it is bf16, only what
    `weights_P` lacks of it is kept, 2 bytes a weight.
    """

    def __init__(
        self,
        config: OptimConfig,
        total_steps: int,
        weights_P: torch.Tensor,
        master_P: torch.Tensor,
        update: Callable[[Callable[..., None]], Callable[..., None]] | None = None,
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.weights_P = weights_P
        self.mean_P = torch.zeros_like(master_P)
        self._square_P = torch.zeros_like(master_P)
        self._rest_P = None if weights_P is master_P else torch.zeros_like(weights_P, dtype=torch.int16)
        if self._rest_P is not None:
            self._take_over(master_P, None)
        device = master_P.device
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.enabled = torch.ones((), dtype=torch.bool, device=device)
        """False while warming up: the update runs in full and changes nothing."""
        self.scalars = torch.zeros(5, dtype=torch.float32, device=device)
        self._compiled = update(adamw_update) if update else None

    def apply(
        self, grads_P: torch.Tensor, denominator: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Update from a SUM of gradients; returns (gradient norm, learning rate, whether it updated), 0-dimensional.

        `denominator` is the global sum of loss weights. Zero, or a gradient that is not finite: nothing changes and
        the step does not count.
        """
        config = self.config
        valid = denominator > 0
        mean_scale = torch.where(valid, 1.0 / denominator, 0.0)
        norm = torch.linalg.vector_norm(grads_P, dtype=torch.float32) * mean_scale
        update = valid & torch.isfinite(norm) & self.enabled
        clip = (config.clip / (norm + 1e-6)).clamp(max=1.0)
        lr = schedule(self.step, config, self.total_steps)
        count = (self.step + 1).to(torch.float64)
        beta1, beta2 = config.betas
        values = (
            mean_scale * clip,
            1.0 - lr * config.weight_decay,
            lr / (1.0 - beta1**count),
            1.0 / (1.0 - beta2**count),
            update,
        )
        self.scalars.copy_(torch.stack([x.to(torch.float32) for x in values]))
        constants = (self.scalars, beta1, beta2, config.eps)
        if self._compiled is not None:
            self._compiled(*self._buffers(), grads_P, *constants)
        else:
            for chunk in self._chunks():
                adamw_update(*self._buffers(chunk), grads_P[chunk], *constants)
        self.step.add_(update)
        return norm, lr.to(torch.float32), update

    def fingerprint(self) -> int:
        """The sum of the master weights' bit patterns; waits for the device."""
        total = torch.zeros((), dtype=torch.int64, device=self.weights_P.device)
        for chunk in self._chunks():
            total += self._whole(chunk)[1].view(torch.int32).sum(dtype=torch.int64)
        return int(total)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bit-exact resume needs: copies in host memory, the device has no room for them to spare."""
        master, square = (torch.empty(self.weights_P.shape, dtype=torch.float32) for _ in range(2))
        for chunk in self._chunks():
            square[chunk], master[chunk] = self._whole(chunk)
        mean, step = (x.to("cpu", copy=True) for x in (self.mean_P, self.step))
        return {"master": master, "mean": mean, "square": square, "step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, in place: no buffer changes its address."""
        pairs = (("master", self.weights_P), ("mean", self.mean_P), ("square", self._square_P), ("step", self.step))
        for name, mine in pairs:
            if state[name].shape != mine.shape:
                raise ValueError(
                    f"the checkpoint's {name} holds {tuple(state[name].shape)} values and this drafter needs "
                    f"{tuple(mine.shape)}: it was written with another drafter configuration"
                )
        with torch.no_grad():
            self.mean_P.copy_(state["mean"])
            self.step.copy_(state["step"])
            self._take_over(state["master"], state["square"])

    def _take_over(self, master_P: torch.Tensor, square_P: torch.Tensor | None) -> None:
        """Hold these; no second moment: zero."""
        for chunk in self._chunks():
            weights, rest, _, square = self._buffers(chunk)
            new_square = torch.zeros_like(square) if square_P is None else square_P[chunk].to(square.device)
            if rest is None:
                weights.copy_(master_P[chunk])
                square.copy_(new_square)
            else:
                _store(master_P[chunk].to(square.device), new_square, weights, rest, square)

    def _whole(self, chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
        weights, rest, _, square = self._buffers(chunk)
        return (square, weights) if rest is None else _whole(weights, rest, square)

    def _buffers(
        self, chunk: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """What `adamw_update` works on, from its `weights_P` to its `square_P`."""
        if self._rest_P is None:
            return self.weights_P[chunk], None, self.mean_P[chunk], self._square_P[chunk]
        weights = self.weights_P.view(torch.int16)
        return weights[chunk], self._rest_P[chunk], self.mean_P[chunk], self._square_P[chunk]

    def _chunks(self) -> Iterator[slice]:
        return (slice(low, low + CHUNK) for low in range(0, self.weights_P.numel(), CHUNK))
