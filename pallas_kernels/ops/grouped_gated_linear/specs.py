"""The registry entry of grouped gated linear layers."""

from __future__ import annotations

from functools import partial

from pallas_kernels.ops._products.specs import product_call
from pallas_kernels.ops.grouped_gated_linear.api import grouped_gated_linear
from pallas_kernels.ops.grouped_gated_linear.mosaic_gpu import grouped_gated_linear_backward
from pallas_kernels.ops.grouped_gated_linear.reference import grouped_gated_linear_reference
from pallas_kernels.ops.grouped_linear.specs import group_arrays, grouped_flops, grouped_result_bytes
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.spec_builders import backward_passes, gradients_of, traffic
from pallas_kernels.specs import OpSpec

_DIFFERENTIABLE = ("x", "w_gate", "w_up")


@product_call
def _call(x, *, groups, outputs, activation="silu", empty=0):
    w, sizes = group_arrays(x, groups, outputs, deviation=2.0, empty=empty)
    operands = {"x": x, "w_gate": w, "w_up": w, "group_sizes": sizes}
    return f"{groups}x{outputs}", operands, ({"activation": activation}, activation), ({}, "empty" * bool(empty))


def _backward(*, x, w_gate, w_up, group_sizes, activation, cotangents):
    (dy,) = cotangents  # stands for both products that the forward pass keeps
    function = get_activation("grouped_gated_linear", activation)
    return grouped_gated_linear_backward(function, (x, w_gate, w_up, group_sizes, dy, dy), dy)[:3]


GROUPED_GATED_LINEAR = OpSpec(
    name="grouped_gated_linear",
    function=grouped_gated_linear,
    reference=grouped_gated_linear_reference,
    differentiable=_DIFFERENTIABLE,
    batched=("x", "w_gate", "w_up", "group_sizes"),
    arg_specs=(
        _call(150, features=128, groups=4, outputs=192),
        _call(70, features=128, groups=9, outputs=128, dtype="float16", activation="gelu_tanh", empty=2),
        _call(30, features=72, groups=3, outputs=40, tags="test ragged"),
        _call(0, features=128, groups=2, outputs=128, tags="test empty"),
        _call(24, features=128, groups=2, outputs=128, fill="zeros", tags="test extreme"),
        _call(3000, features=1024, groups=17, outputs=1088, activation="gelu_tanh", empty=1, tags="gpu"),
        _call(16384, features=4096, groups=8, outputs=14336, tags="gpu bench"),
        _call(16384, features=2048, groups=64, outputs=1536, tags="gpu bench"),
        _call(64, features=2048, groups=128, outputs=768, tags="gpu bench"),
    ),
    forward_traffic=traffic(read=_DIFFERENTIABLE, written=("y",), y=partial(grouped_result_bytes, weight="w_gate")),
    backward_traffic=traffic(
        read=(*_DIFFERENTIABLE, "y", "y", "y"),
        written=_DIFFERENTIABLE,
        y=partial(grouped_result_bytes, weight="w_gate"),
    ),
    backward=backward_passes(mosaic=_backward, xla=gradients_of(grouped_gated_linear_reference, *_DIFFERENTIABLE)),
    flops=partial(grouped_flops, weights=("w_gate", "w_up")),
)
