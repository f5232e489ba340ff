"""The registry entry of the low-rank corrected linear layer."""

from __future__ import annotations

from dataclasses import replace

from pallas_kernels.ops._products.norm import as_rows
from pallas_kernels.ops._products.specs import epilogue, product_call, result_bytes, rows_of, weight
from pallas_kernels.ops.lora_linear.api import lora_linear
from pallas_kernels.ops.lora_linear.mosaic_gpu import lora_linear_backward
from pallas_kernels.ops.lora_linear.reference import lora_linear_reference
from pallas_kernels.spec_builders import backward_passes, gradients_of, traffic
from pallas_kernels.specs import Arguments, OpSpec, array_bytes


@product_call
def _call(x, *, outputs, rank=16, bias=False, alpha=2.0):
    b = weight(replace(x, shape=(rank,)), outputs)
    operands = {"x": x, "w": weight(x, outputs), "a": weight(x, rank), "b": b, "alpha": alpha}
    return f"{outputs}-rank{rank}", operands, epilogue(x, outputs, bias=bias)


def _weight_bytes(arguments: Arguments) -> int:
    return sum(array_bytes(arguments[name]) for name in ("w", "a", "b"))


def _flops(arguments: Arguments, phase: str) -> int:
    (features, outputs), rank = arguments["w"].shape, arguments["a"].shape[1]
    forward = 2 * rows_of(arguments) * (features * outputs + rank * (features + outputs))
    return forward if phase == "forward" else 2 * forward


def _backward(*, x, w, a, b, cotangents, alpha=1.0, bias=None):
    dx, *rest = lora_linear_backward(as_rows(x), w, a, b, bias, as_rows(cotangents[0]), alpha=alpha)
    return tuple(value for value in (dx.reshape(x.shape), *rest) if value is not None)


_DIFFERENTIABLE = ("x", "w", "a", "b", "bias")

LORA_LINEAR = OpSpec(
    name="lora_linear",
    function=lora_linear,
    reference=lora_linear_reference,
    differentiable=_DIFFERENTIABLE,
    batched=("x",),
    arg_specs=(
        _call(2, 12, features=128, outputs=192, rank=8, bias=True),
        _call(40, features=64, outputs=128, rank=72, dtype="float16"),
        _call(0, features=64, outputs=128, rank=4, tags="test empty"),
        _call(777, features=1024, outputs=4032, rank=4, bias=True, tags="gpu"),
        _call(515, features=4160, outputs=1088, rank=128, tags="gpu"),
        _call(2200, features=1024, outputs=2048, rank=16, dtype="float16", tags="gpu"),
        _call(2060, features=1024, outputs=2048, rank=72, bias=True, tags="gpu"),
        _call(600, features=1024, outputs=2048, rank=64, tags="gpu"),
        *(
            _call(rows, features=4096, outputs=outputs, rank=16, tags="gpu bench block")
            for rows in (8192, 512)
            for outputs in (4096, 14336)
        ),
        _call(8192, features=4096, outputs=4096, rank=64, tags="bench"),
    ),
    forward_traffic=traffic(read=("x", "weights"), written=("y",), weights=_weight_bytes, y=result_bytes()),
    backward_traffic=traffic(
        read=("x", "weights", "y"), written=("x", "weights"), weights=_weight_bytes, y=result_bytes()
    ),
    backward=backward_passes(mosaic=_backward, xla=gradients_of(lora_linear_reference, *_DIFFERENTIABLE)),
    flops=_flops,
)
