"""Whether a target runs a packed row in one forward, or its documents one by one: tried out, never assumed."""

from __future__ import annotations

import itertools
from typing import Literal

import torch

from trainer.config import TargetConfig
from trainer.model.target_layers import TakenApart, TrunkLayer, rows_keep_documents_apart, unknown_layer
from trainer.model.target_models import TargetError, capture_outputs, decoder_layers, is_hybrid, make_body
from trainer.model.targets import Target

EXACT = 1e-4
"""How far a token of an fp32 target may be off, relative."""
ROUNDED = 0.12
"""How far a 16-bit target's states may be off at the first captured layer, over all tokens: 27B random weights in bf16
reach 1.7 % at layer 1 and 10 % at layer 61."""
GROSS = 0.5
"""The same for 8-bit weights."""


def choose_packing(config: TargetConfig, target: Target) -> Literal["row", "documents"]:
    """Try a row of three documents against the same documents alone; takes the target's layers apart where needed.

    Raises TargetError where `row` is asked for and would leak.
    """
    needs_row = config.packing == "row" or config.compile
    if config.packing == "documents" or (target.device.type == "cpu" and not needs_row):
        return "documents"
    known = rows_keep_documents_apart(decoder_layers(target.model))
    compile = config.compile if config.compile is not None else known and target.device.type == "cuda"
    if compile or (known and is_hybrid(target.model)):
        target.apart = take_apart(target, compile=compile)
    leak = packing_leak(target)
    if leak is not None and target.apart is not None and config.compile is None and not is_hybrid(target.model):
        target.apart = None  # nobody asked for it: the layers as they are may do
        leak = packing_leak(target)
    if leak is not None and needs_row and is_hybrid(target.model):
        apart = target.apart = target.apart or take_apart(target, compile=False)
        apart.run_by_document()
        leak = packing_leak(target)
    if leak is None:
        return "row"
    target.apart = None
    if needs_row:
        raise TargetError(
            f"{target.name} does not keep packed documents apart in one forward ({leak}); set target.packing=documents"
            + (" and leave target.compile out" if config.compile else "")
        )
    return "documents"


def packing_leak(target: Target) -> str | None:
    """How a packed row differs from its documents alone; None where it does not."""
    lengths = (70, 5, 130)  # around a chunk of the linear attention, and shorter than its convolution's reach
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(0, target.vocab_size, (sum(lengths),), generator=generator)
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    bounds = [0, *itertools.accumulate(lengths)]
    others_T = torch.cat([(ids_T[: lengths[0]] + 1) % target.vocab_size, ids_T[lengths[0] :]])
    alone_TKH = torch.cat([target.document_states(ids_T[a:b]) for a, b in itertools.pairwise(bounds)]).float()
    try:
        row_TKH = target.row_states(ids_T, positions_T, bounds).float()
        beside_TKH = target.row_states(others_T, positions_T, bounds).float()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"one forward over several documents is refused: {error}"
    if target.dtype == torch.float32 and not target.fp8:
        worst = _worst_error(row_TKH, alone_TKH)
        if worst > EXACT:
            return f"states differ by {worst:.1%} from the documents alone"
    else:
        # Other tile shapes and other places to round: layer by layer that grows, in 8 bits until nothing is left to
        # compare (78 % after 62 layers of random weights). The first captured layer still tells a row that ignores its
        # bounds, which is off by its own size.
        first = slice(0, target.hidden_size)
        off = float((row_TKH - alone_TKH)[:, first].norm() / alone_TKH[:, first].norm())
        if off > (GROSS if target.fp8 else ROUNDED):
            return f"states differ by {off:.1%} from the documents alone"
    # The same kernels on the same shapes: here nothing at all differs, and the smallest leak, of a recurrent state
    # alone, is 28 %.
    worst = _worst_error(beside_TKH[lengths[0] :], row_TKH[lengths[0] :])
    return None if worst <= 1e-2 else f"states differ by {worst:.1%} beside another document"


def _worst_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)).max())


def take_apart(target: Target, *, compile: bool) -> TakenApart:
    """The target's layers as shells (target_layers.py), compiled if `compile`. Raises TargetError."""
    layers = decoder_layers(target.model)
    for number, layer in enumerate(layers):
        if (reason := unknown_layer(layer)) is not None:
            raise TargetError(
                f"the layers of {target.name} cannot be taken apart: layer {number}: {reason}, and the trainer knows a "
                "norm, attention or GatedDeltaNet, a norm and a gated MLP; leave target.compile out and set "
                "target.packing=documents"
            )
    own = rows_keep_documents_apart(layers)
    shells = [TrunkLayer(layer, target.tokenwise, own_recurrence=own) for layer in layers]
    capture_outputs(shells, target.layer_ids, target._captured)
    return TakenApart(
        layers=shells,
        trunk=make_body(target.model, shells[: target.layer_ids[-1] + 1], norm=False),
        body=make_body(target.model, shells, norm=True),
        compile=compile,
        own_recurrence=own,
    )
