"""The gated linear layer's registry entry."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.ops._products.norm import as_rows, is_fusable
from pallas_kernels.ops._products.product import candidates
from pallas_kernels.ops._products.specs import (
    NORM_ARRAYS,
    norm_arguments,
    normed,
    product_call,
    product_flops,
    result_bytes,
    rows_of,
    weight,
    with_norm,
)
from pallas_kernels.ops.gated_activation.reference import gated_activation_reference
from pallas_kernels.ops.gated_linear.api import gated_linear
from pallas_kernels.ops.gated_linear.config import tuned_key
from pallas_kernels.ops.gated_linear.mosaic_gpu import gated_linear_forward
from pallas_kernels.ops.gated_linear.mosaic_gpu_vjp import gated_linear_backward
from pallas_kernels.ops.gated_linear.reference import gated_linear_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.spec_builders import as_taken, both_passes, traffic, variants
from pallas_kernels.specs import Arguments, ArraySpec, OpSpec

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


def _configs(arguments: Arguments):
    is_normed = is_fusable(with_norm(arguments).get("norm"), arguments["x"])
    return candidates(rows_of(arguments), products=2, is_normed=is_normed)


def _forward(*, config=None, **arguments):
    called = with_norm(arguments)
    x, norm, function = called["x"], called.get("norm"), get_activation("gated_linear", called["activation"])
    rows, options = normed(x, norm, config)
    w_gate, w_up = (called[name] for name in _WEIGHTS)
    biases = called.get("bias_gate"), called.get("bias_up")
    y = gated_linear_forward(rows, w_gate, w_up, biases, activation=function, **options, config=config)
    return (y.reshape(*x.shape[:-1], -1),)


def _backward(implementation, arguments, cotangents):
    if arguments.keys() & {"norm", *_BIASES}:
        return both_passes(_FUNCTION, *_DIFFERENTIABLE)(implementation, arguments, cotangents)
    x, w_gate, w_up = (arguments[name] for name in ("x", *_WEIGHTS))
    (dy,) = cotangents
    if implementation == "mosaic":
        # dy stands for both products that the forward pass keeps; it has their shape and dtype.
        rows, function = as_rows(dy), get_activation("gated_linear", arguments["activation"])
        gradients = gated_linear_backward(as_rows(x), w_gate, w_up, rows, rows, rows, activation=function)
        return gradients[0].reshape(x.shape), *gradients[1:3]

    def gating(gate, up):
        return gated_activation_reference(gate, up, activation=arguments["activation"])

    products = jax.vjp(lambda x, w_gate, w_up: (x @ w_gate, x @ w_up), x, w_gate, w_up)[1]
    return products(jax.vjp(gating, dy, dy)[1](dy))


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
        _call(3, features=64, outputs=128, activation="gelu"),
        _call(5, features=100, outputs=96, tags="test ragged"),
        _call(0, features=64, outputs=128, tags="test empty"),
        _call(24, features=64, outputs=128, fill="zeros", tags="test extreme"),
        _call(3, features=64, outputs=128, biases=("gate", "up")),
        _call(70, features=64, outputs=192, biases=("gate", "up"), dtype="float16", activation="gelu"),
        _call(66, features=128, outputs=128, biases=("up",), norm="rms"),
        _call(4, features=128, outputs=128, norm="rms"),
        _call(4, features=128, outputs=128, norm="rms", rounds=True),
        _call(40, features=128, outputs=128, norm="rms", scaled=False, mean_square=True),
        _call(1000, features=4096, outputs=1024, tags="gpu"),
        _call(600, features=1024, outputs=2048, norm="layer", tags="gpu"),
        _call(520, features=1024, outputs=2048, norm="rms", scaled=False, mean_square=True, tags="gpu"),
        _call(777, features=1024, outputs=4032, activation="gelu_tanh", tags="gpu"),
        _call(777, features=1024, outputs=4032, activation="gelu_tanh", biases=("gate", "up"), tags="gpu"),
        _call(17, features=1024, outputs=4096, biases=("gate", "up"), tags="gpu"),
        _call(2, 300, features=2048, outputs=2048, dtype="float16", activation="relu", tags="gpu"),
        _call(1, features=4096, outputs=4096, tags="gpu"),
        _call(17, features=1024, outputs=4096, tags="gpu"),
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
    variants=variants((_forward, _configs)),  # backward products are XLA's
    tuned_key=lambda arguments: tuned_key(arguments["x"], arguments["w_gate"], arguments["activation"]),
    flops=partial(product_flops, weights=_WEIGHTS),
)
