"""The registry entry of linear layer, residual sum and mean squares in one."""

from __future__ import annotations

from pallas_kernels.ops._products.specs import epilogue, product_call, product_flops, weight
from pallas_kernels.ops.linear_residual_norm.api import linear_residual_norm
from pallas_kernels.ops.linear_residual_norm.reference import linear_residual_norm_reference
from pallas_kernels.spec_builders import both_passes, traffic
from pallas_kernels.specs import ArraySpec, OpSpec


@product_call
def _call(x, *, outputs, bias=False):
    residual = ArraySpec(shape=(*x.shape[:-1], outputs), dtype=x.dtype)
    operands = {"x": x, "w": weight(x, outputs), "residual": residual}
    return outputs, operands, epilogue(x, outputs, bias=bias)


_DIFFERENTIABLE = ("x", "w", "bias", "residual")

LINEAR_RESIDUAL_NORM = OpSpec(
    name="linear_residual_norm",
    function=linear_residual_norm,
    reference=linear_residual_norm_reference,
    differentiable=_DIFFERENTIABLE,
    batched=("x", "residual"),
    arg_specs=(
        _call(2, 5, features=64, outputs=320, bias=True),
        _call(130, features=64, outputs=128, dtype="float16"),
        _call(5, features=100, outputs=96, dtype="float32", bias=True, tags="test ragged"),
        _call(0, features=64, outputs=128, tags="test empty"),
        _call(1000, features=4096, outputs=1024, tags="gpu"),
        _call(777, features=1024, outputs=4032, bias=True, tags="gpu"),
        _call(600, features=1024, outputs=1088, dtype="float16", tags="gpu"),
        _call(17, features=1024, outputs=4096, bias=True, tags="gpu"),
        *(_call(rows, features=14336, outputs=4096, tags="gpu bench") for rows in (8192, 512, 16, 1)),
        *(_call(rows, features=4096, outputs=4096, tags="gpu bench") for rows in (8192, 512)),
    ),
    forward_traffic=traffic(read=("x", "w", "residual"), written=("residual",)),
    backward_traffic=traffic(read=("x", "w", "residual", "residual"), written=("x", "w", "residual")),
    backward=both_passes(linear_residual_norm, *_DIFFERENTIABLE),
    flops=product_flops,
)
