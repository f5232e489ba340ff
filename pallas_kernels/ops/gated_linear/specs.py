"""The gated linear layer's registry entry."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.ops._products.norm import as_rows
from pallas_kernels.ops._products.product import products_by_xla
from pallas_kernels.ops._products.specs import (
    NORM_ARRAYS,
    norm_arguments,
    product_call,
    product_flops,
    result_bytes,
    weight,
    with_norm,
)
from pallas_kernels.ops.gated_activation.reference import gated_activation_reference
from pallas_kernels.ops.gated_linear.api import gated_linear
from pallas_kernels.ops.gated_linear.mosaic_gpu import gating
from pallas_kernels.ops.gated_linear.reference import gated_linear_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.spec_builders import as_taken, both_passes, traffic
from pallas_kernels.specs import ArraySpec, OpSpec

_WEIGHTS = ("w_gate", "w_up")
_BIASES = ("bias_gate", "bias_up")


@product_call
def _call(x, *, outputs, activation="silu", norm=None, biases=(), **which):
    """Makes a call whose products have a standard deviation of 2, as is common before an activation."""
    w = weight(x, outputs, deviation=2)
    operands = {"x": x, "w_gate": w, "w_up": w}
    given = {f"bias_{name}": ArraySpec(shape=(outputs,), dtype=x.dtype) for name in biases}
    label = f"bias {'+'.join(biases)}" if biases else ""
    return outputs, operands, ({"activation": activation}, activation), (given, label), norm_arguments(x, norm, **which)


def _backward(implementation, arguments, cotangents):
    if arguments.keys() & {"norm", *_BIASES}:
        return both_passes(_FUNCTION, *_DIFFERENTIABLE)(implementation, arguments, cotangents)
    x, w_gate, w_up = (arguments[name] for name in ("x", *_WEIGHTS))
    # dy stands for both products that the forward pass keeps; it has their shape and dtype.
    dy, gate_by, products = as_rows(cotangents[0]), gating, products_by_xla
    function = get_activation("gated_linear", arguments["activation"])
    if implementation == "xla":
        gate_by, products = _gating_by_xla, lambda x, weights, biases: tuple(x @ w for w in weights)
    dproducts = jax.vjp(partial(gate_by, function), dy, dy)[1](dy)
    pull_back = jax.vjp(lambda x, weights: products(x, weights, (None, None)), as_rows(x), (w_gate, w_up))[1]
    dx, dweights = pull_back(dproducts)
    return dx.reshape(x.shape), *dweights


def _gating_by_xla(activation, gate, up):
    return gated_activation_reference(gate, up, activation=activation.name)


_DIFFERENTIABLE = ("x", *_WEIGHTS, *NORM_ARRAYS, *_BIASES)
_FUNCTION = as_taken(gated_linear, with_norm)

GATED_LINEAR = OpSpec(
    name="gated_linear",
    function=_FUNCTION,
    reference=as_taken(gated_linear_reference, with_norm),
    differentiable=_DIFFERENTIABLE,
    batched=("x", "mean_square"),
    arg_specs=(
        _call(2, 72, features=128, outputs=192),
        _call(70, features=192, outputs=128, dtype="float16", activation="gelu_tanh"),
        _call(5, features=100, outputs=96, tags="test ragged"),
        _call(0, features=64, outputs=128, tags="test empty"),
        _call(24, features=64, outputs=128, fill="zeros", tags="test extreme"),
        _call(3, features=64, outputs=128, biases=("gate", "up")),
        _call(70, features=64, outputs=192, biases=("gate", "up"), dtype="float16", activation="gelu"),
        _call(66, features=128, outputs=128, biases=("up",), norm="rms"),
        _call(4, features=128, outputs=128, norm="rms"),
        _call(4, features=128, outputs=128, norm="rms", rounds=True),
        _call(40, features=128, outputs=128, norm="rms", scaled=False, mean_square=True),
        _call(600, features=1024, outputs=2048, norm="layer", tags="gpu"),
        _call(520, features=1024, outputs=2048, norm="rms", scaled=False, mean_square=True, tags="gpu"),
        _call(777, features=1024, outputs=4032, activation="gelu_tanh", biases=("gate", "up"), tags="gpu"),
        _call(17, features=1024, outputs=4096, biases=("gate", "up"), tags="gpu"),
        _call(2, 300, features=2048, outputs=2048, dtype="float16", activation="relu", tags="gpu"),
        *(_call(rows, features=4096, outputs=14336, tags="gpu bench block") for rows in (8192, 512, 16, 1)),
        *(_call(rows, features=4096, outputs=14336, norm="rms", tags="gpu bench") for rows in (8192, 512, 16, 1)),
        *(
            _call(rows, features=4096, outputs=14336, norm="rms", scaled=False, mean_square=True, tags="gpu bench")
            for rows in (8192, 512)
        ),
    ),
    forward_traffic=traffic(read=("x", *_WEIGHTS), written=("y",), y=result_bytes("w_gate")),
    backward_traffic=traffic(read=("x", *_WEIGHTS, "y", "y", "y"), written=("x", *_WEIGHTS), y=result_bytes("w_gate")),
    backward=_backward,
    flops=partial(product_flops, weights=_WEIGHTS),
)
