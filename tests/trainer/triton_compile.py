"""Compile every Triton kernel for a Hopper GPU, which takes no GPU; `test_triton_kernels.py` runs this."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainer.model import head_kernels, swiglu_kernel

HOPPER = GPUTarget("cuda", 90, 32)
ROW = {"logits": "*bf16", "labels": "*i64", "weights": "*fp32", "tops": "*i64", "losses": "*fp32", "scales": "*fp32"}
STRIDES = {"stride": "i64", "values_stride": "i64"}
LAYOUT = ["logits", "labels", "weights", "tops", "losses", "values", "scales", "stride", "values_stride"]


def main() -> None:
    """Print a line for each; what does not compile raises."""
    for values, scaled in (("*bf16", False), ("*fp8e4nv", True)):
        types = ROW | STRIDES | {"values": values}
        constants = {
            "columns": 248320,
            "smallest": head_kernels.SMALLEST_SCALE,
            "largest": head_kernels.LARGEST_E4M3,
            "scaled": scaled,
            "tile": head_kernels.TILE,
        }
        signature = {name: types[name] for name in LAYOUT} | dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=head_kernels._row_pass, signature=signature, constexprs=constants)
        made = triton.compile(source, target=HOPPER, options={"num_warps": head_kernels.WARPS})
        print("row pass", values, made.metadata.shared, "bytes shared")
    constants = {"width": 17408, "tiles": 17, "tile": swiglu_kernel.TILE}
    signature = dict.fromkeys(("gate_up", "grad", "to_gate_up", "made"), "*bf16") | dict.fromkeys(
        constants, "constexpr"
    )
    source = ASTSource(fn=swiglu_kernel._backward, signature=signature, constexprs=constants)
    print("swiglu", triton.compile(source, target=HOPPER, options={"num_warps": 4}).metadata.shared, "bytes shared")


if __name__ == "__main__":
    main()
