"""What the drafter's backward keeps, tensor by tensor: counted, not measured.

    python -m benchmarks.saved_tensors --shape 27b --documents 4 [--fp8] [--recompute elementwise] [--recompute-mlps N]

The whole drafter is traced at full size on tensors without memory, as `torch.compile` traces it, and split into forward
and backward by the same partitioner; what the forward hands to the backward is listed by storage, so views count once.
Attention is a stand-in that keeps what FlexAttention keeps: queries, keys, values, output and log-sum-exp. Any machine
can run it; a minute or two.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.bench.cli import positive
from trainer.bench.shapes import SHAPES, BenchShape, drafter_shape
from trainer.graphs import recomputing
from trainer.model import fp8
from trainer.model.drafter import Drafter
from trainer.optim import FlatLayout
from trainer.step import drafter_forward

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("saved_tensors::attend", mutates_args=())
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise RuntimeError("a stand-in for tracing")


@torch.library.custom_op("saved_tensors::attend_backward", mutates_args=())
def _attend_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor
) -> Tensors:
    raise RuntimeError("a stand-in for tracing")


@_attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@_attend_backward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> Tensors:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: Tensors, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _back(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
    return _attend_backward(*ctx.saved_tensors, grad)


_attend.register_autograd(_back, setup_context=_keep)


def attend(layer: int, q_hQD: torch.Tensor, k_gSD: torch.Tensor, v_gSD: torch.Tensor) -> torch.Tensor:
    """FlexAttention's place in the trace."""
    out: torch.Tensor = _attend(q_hQD, k_gSD, v_gSD)[0]
    return out


def saved_tensors(
    shape: BenchShape, documents: int, *, in_8_bits: bool = False, recompute: str = "none", recompute_mlps: int = 0
) -> dict[str, int]:
    """Bytes that forward keeps for backward, by shape and type of what is kept; weights and inputs are left out."""
    tokens, slots = documents * shape.document_tokens, documents * shape.anchors
    rows = slots * shape.drafter.block_size
    kept: dict[str, int] = defaultdict(int)

    def forward(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        given = {_storage(node) for node in graph.graph.nodes if node.op == "placeholder"}
        seen: set[int] = set()
        # The first output is the drafter's own; the rest is what backward is given.
        for node in outputs[1:]:
            value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
            if isinstance(value, torch.Tensor) and (place := _storage(node)) not in given | seen:
                seen.add(place)
                kept[f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"] += (
                    value.untyped_storage().nbytes()
                )
        return graph.forward

    drafter = Drafter.empty(drafter_shape(shape), "meta")
    layout = FlatLayout.of(drafter)
    with FakeTensorMode(allow_non_fake_inputs=True), recomputing(elementwise=recompute == "elementwise"):
        flat = torch.zeros(layout.total, dtype=torch.bfloat16)
        for name, view in layout.views(flat).items():
            owner, _, leaf = name.rpartition(".")
            setattr(drafter.get_submodule(owner), leaf, torch.nn.Parameter(view))
        drafter.rotary.inv_freq = torch.empty(shape.drafter.head_dim // 2)

        def joined(names: Sequence[str]) -> torch.Tensor | None:
            weight = layout.joined(flat, names)
            return None if weight is None else weight.detach().requires_grad_()

        drafter.join(joined)
        torch.compile(
            drafter_forward,
            fullgraph=True,
            dynamic=False,
            backend=aot_autograd(
                fw_compiler=forward,
                bw_compiler=lambda graph, inputs: graph.forward,
                partition_fn=min_cut_rematerialization_partition,
            ),
        )(
            drafter,
            torch.empty(tokens, shape.features * shape.hidden_size, dtype=torch.bfloat16),
            drafter.ropes(torch.zeros(tokens, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)),
            torch.empty(slots, shape.hidden_size, dtype=torch.bfloat16),
            torch.empty(shape.hidden_size, dtype=torch.bfloat16),
            attend,
            fp8.linear if in_8_bits else torch.nn.functional.linear,
            recompute_mlps,
            recompute == "elementwise",
        )
    return dict(kept)


def _storage(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else -1


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list, largest first, and the sum."""
    parser = argparse.ArgumentParser(prog="benchmarks.saved_tensors", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="27b")
    parser.add_argument("--documents", type=positive, default=4)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--recompute", choices=("none", "elementwise"), default="none")
    parser.add_argument("--recompute-mlps", type=int, default=0)
    options = parser.parse_args(argv)
    kept = saved_tensors(
        SHAPES[options.shape],
        options.documents,
        in_8_bits=options.fp8,
        recompute=options.recompute,
        recompute_mlps=options.recompute_mlps,
    )
    for name, size in sorted(kept.items(), key=lambda item: -item[1]):
        print(f"{size / 1e6:10.1f} MB  {name}")
    print(f"{sum(kept.values()) / 1e6:10.1f} MB  in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
