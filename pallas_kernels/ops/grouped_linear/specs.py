"""The registry entries of grouped linear layers, plain and gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from pallas_kernels.ops._products.specs import product_call
from pallas_kernels.ops.grouped_linear.api import grouped_gated_linear, grouped_linear
from pallas_kernels.ops.grouped_linear.mosaic_gpu import grouped_gated_linear_backward, grouped_linear_backward
from pallas_kernels.ops.grouped_linear.reference import grouped_gated_linear_reference, grouped_linear_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.spec_builders import backward_passes, gradients_of, traffic
from pallas_kernels.specs import ArgSpec, Arguments, ArraySpec, OpSpec


@product_call
def _call(x, *, groups, outputs, is_gated=False, bias=False, activation=None, transpose=False, empty=0):
    """Makes a call whose sizes sum to about the rows. empty: so many groups for each one with rows have none."""
    rows, features = x.shape
    sizes = (outputs, features) if transpose else (features, outputs)
    # A gated product is as large as a plain one if its factors are larger.
    deviation = (2.0 if is_gated else 1.0) * features**-0.5
    w = ArraySpec(shape=(groups, *sizes), dtype=x.dtype, deviation=deviation)
    most = 2 * rows // groups + 1
    biases = ("bias_gate", "bias_up") if is_gated else ("bias",)
    operands = {
        "x": x,
        **({"w_gate": w, "w_up": w} if is_gated else {"w": w}),
        "group_sizes": ArraySpec(shape=(groups,), dtype="int32", fill="integers", minimum=-empty * most, maximum=most),
        **{name: bias and ArraySpec(shape=(groups, outputs), dtype=x.dtype) for name in biases},
    }
    options = {"activation": activation, **({} if is_gated else {"transpose": transpose})}
    details = "bias" * bias, activation or "", "transposed" * transpose, "empty" * bool(empty)
    return f"{groups}x{outputs}", operands, (options, ""), *(({}, detail) for detail in details)


_gated = partial(_call, is_gated=True, activation="silu")


def _result_bytes(arguments: Arguments, *, weight: str) -> int:
    x = arguments["x"]
    return x.shape[0] * _outputs(arguments, weight) * x.dtype.itemsize


def _outputs(arguments: Arguments, weight: str) -> int:
    return arguments[weight].shape[1 if arguments.get("transpose") else 2]


def _flops(arguments: Arguments, phase: str, *, weights: tuple[str, ...]) -> int:
    """Counts the multiplications and additions of a phase, as if every row had a group."""
    rows, features = arguments["x"].shape
    outputs = sum(_outputs(arguments, name) for name in weights)
    return 2 * rows * features * outputs * (1 if phase == "forward" else 2)


def _linear_backward(*, x, w, group_sizes, bias=None, activation=None, transpose=False, cotangents):
    (dy,) = cotangents  # stands for the product that the forward pass keeps
    function = None if activation is None else get_activation("grouped_linear", activation)
    saved = (x, w, bias, group_sizes, *([] if function is None else [dy]))
    gradients = grouped_linear_backward(function, transpose, saved, dy)
    return tuple(gradient for gradient in gradients if gradient is not None)


def _gated_backward(*, x, w_gate, w_up, group_sizes, activation, bias_gate=None, bias_up=None, cotangents):
    (dy,) = cotangents  # stands for both products that the forward pass keeps
    function = get_activation("grouped_gated_linear", activation)
    saved = (x, w_gate, w_up, (bias_gate, bias_up), group_sizes, dy, dy)
    dx, dw_gate, dw_up, dbiases, _ = grouped_gated_linear_backward(function, saved, dy)
    return dx, dw_gate, dw_up, *(each for each in dbiases if each is not None)


def _operation(
    function: Callable[..., Any],
    reference: Callable[..., jax.Array],
    backward: Callable[..., tuple[jax.Array, ...]],
    differentiable: tuple[str, ...],
    *,
    weights: tuple[str, ...],
    read_again: int,
    calls: tuple[ArgSpec, ...],
) -> OpSpec:
    """Makes an entry. read_again: how many arrays as large as the result the backward pass reads."""
    result = partial(_result_bytes, weight=weights[0])
    return OpSpec(
        name=function.__name__,
        function=function,
        reference=reference,
        differentiable=differentiable,
        batched=(*differentiable, "group_sizes"),
        arg_specs=calls,
        forward_traffic=traffic(read=differentiable, written=("y",), y=result),
        backward_traffic=traffic(read=("x", *weights, *["y"] * read_again), written=differentiable, y=result),
        backward=backward_passes(mosaic=backward, xla=gradients_of(reference, *differentiable)),
        flops=partial(_flops, weights=weights),
    )


GROUPED_LINEAR = _operation(
    grouped_linear,
    grouped_linear_reference,
    _linear_backward,
    ("x", "w", "bias"),
    weights=("w",),
    read_again=1,
    calls=(
        _call(150, features=128, groups=4, outputs=192),
        _call(203, features=192, groups=3, outputs=128, dtype="float16", transpose=True),
        _call(70, features=128, groups=9, outputs=128, empty=1, bias=True, activation="silu"),
        _call(40, features=128, groups=16, outputs=128, bias=True),
        _call(30, features=72, groups=3, outputs=40, tags="test ragged"),
        _call(0, features=128, groups=2, outputs=128, tags="test empty"),
        _call(24, features=128, groups=2, outputs=128, fill="zeros", tags="test extreme"),
        _call(3000, features=1024, groups=17, outputs=1088, bias=True, activation="gelu_tanh", tags="gpu"),
        _call(2222, features=576, groups=64, outputs=768, dtype="float16", transpose=True, empty=3, tags="gpu"),
        _call(16384, features=4096, groups=8, outputs=14336, tags="gpu bench"),
        _call(16384, features=2048, groups=64, outputs=1536, tags="gpu bench"),
        _call(65536, features=2048, groups=128, outputs=768, tags="gpu bench"),
        _call(64, features=2048, groups=128, outputs=768, tags="gpu bench"),
    ),
)

GROUPED_GATED_LINEAR = _operation(
    grouped_gated_linear,
    grouped_gated_linear_reference,
    _gated_backward,
    ("x", "w_gate", "w_up", "bias_gate", "bias_up"),
    weights=("w_gate", "w_up"),
    read_again=3,
    calls=(
        _gated(150, features=128, groups=4, outputs=192),
        _gated(70, features=128, groups=9, outputs=128, dtype="float16", activation="gelu_tanh", empty=2, bias=True),
        _gated(30, features=72, groups=3, outputs=40, tags="test ragged"),
        _gated(0, features=128, groups=2, outputs=128, tags="test empty"),
        _gated(24, features=128, groups=2, outputs=128, fill="zeros", tags="test extreme"),
        _gated(3000, features=1024, groups=17, outputs=1088, activation="gelu_tanh", empty=1, bias=True, tags="gpu"),
        _gated(16384, features=4096, groups=8, outputs=14336, tags="gpu bench"),
        _gated(16384, features=2048, groups=64, outputs=1536, tags="gpu bench"),
        _gated(64, features=2048, groups=128, outputs=768, tags="gpu bench"),
    ),
)
