"""AdamW on fp32 master weights, over one flat buffer, without a host synchronisation.

Everything that changes from step to step (learning rate, bias correction, clipping, the number of the step) lives in
device tensors, so that the whole update can be captured in a CUDA graph and replayed.

The update is Loshchilov and Hutter's decoupled weight decay (arXiv 1711.05101) with Adam's bias correction; clipping is
by the global norm, as torch.nn.utils.clip_grad_norm_ does it.

Shape legend: P elements of the flat buffer (all parameters, each padded to a multiple of ALIGN).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.config import OptimConfig

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
    master_P: torch.Tensor,
    mean_P: torch.Tensor,
    square_P: torch.Tensor,
    grads_P: torch.Tensor,
    scalars: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One element-wise pass: read the gradient, write both moments, the master weight and the working weight.

    `scalars` is fp32 [6]: gradient scale, weight decay factor, lr / (1 - beta1^t), 1 / (1 - beta2^t), and whether to
    update at all (1) or to write back what was there (0); the last is spare. Without the update nothing changes,
    not even by a NaN gradient.
    """
    scale, decay, rate, unbias, update = (scalars[i] for i in range(5))
    grad = grads_P.float() * scale
    mean = beta1 * mean_P + (1 - beta1) * grad
    square = beta2 * square_P + (1 - beta2) * grad * grad
    master = master_P * decay - rate * mean / (torch.sqrt(square * unbias) + eps)
    go = update > 0
    mean_P.copy_(torch.where(go, mean, mean_P))
    square_P.copy_(torch.where(go, square, square_P))
    new_master = torch.where(go, master, master_P)
    master_P.copy_(new_master)
    weights_P.copy_(new_master)


class FlatAdamW:
    """Master weights, moments and step count of one drafter, and the update of all of them.

    `weights_P` (working precision) and `grads_P` belong to the caller and share the layout.
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
        self.master_P = master_P
        self.mean_P = torch.zeros_like(master_P)
        self.square_P = torch.zeros_like(master_P)
        device = master_P.device
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.enabled = torch.ones((), dtype=torch.bool, device=device)
        """False while warming up: the update runs in full and changes nothing."""
        self.scalars = torch.zeros(6, dtype=torch.float32, device=device)
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
            update,
        )
        self.scalars.copy_(torch.stack([x.to(torch.float32) for x in values]))
        if self._compiled is not None:
            self._compiled(
                self.weights_P,
                self.master_P,
                self.mean_P,
                self.square_P,
                grads_P,
                self.scalars,
                beta1,
                beta2,
                config.eps,
            )
        else:
            buffers = (self.weights_P, self.master_P, self.mean_P, self.square_P, grads_P)
            for low in range(0, self.master_P.numel(), CHUNK):
                weights, master, mean, square, grads = (x[low : low + CHUNK] for x in buffers)
                adamw_update(weights, master, mean, square, grads, self.scalars, beta1, beta2, config.eps)
        self.step.add_(update)
        return norm, lr.to(torch.float32), update

    def state_dict(self) -> dict[str, Any]:
        """Everything that a bit-exact resume needs."""
        return {
            "master": self.master_P.detach().clone(),
            "mean": self.mean_P.clone(),
            "square": self.square_P.clone(),
            "step": self.step.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state, in place: no buffer changes its address."""
        pairs = (("master", self.master_P), ("mean", self.mean_P), ("square", self.square_P), ("step", self.step))
        for name, mine in pairs:
            if state[name].shape != mine.shape:
                raise ValueError(
                    f"the checkpoint's {name} holds {tuple(state[name].shape)} values and this drafter needs "
                    f"{tuple(mine.shape)}: it was written with another drafter configuration"
                )
        with torch.no_grad():
            for name, mine in pairs:
                mine.copy_(state[name])
            self.weights_P.copy_(self.master_P)
