"""The registry entries of linear layers: plain, after a norm, and in front of one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.checks import optional_activation
from pallas_kernels.ops._products.layer import Layer, LayerArrays
from pallas_kernels.ops._products.norm import as_rows
from pallas_kernels.ops._products.specs import (
    NORM_ARRAYS,
    bench_tags,
    epilogue,
    kept_bytes,
    norm_arguments,
    product_call,
    product_flops,
    result_bytes,
    rows_of,
    weight,
    with_norm,
)
from pallas_kernels.ops.linear.api import linear, linear_residual_norm, norm_linear
from pallas_kernels.ops.linear.config import candidates, tuned_key
from pallas_kernels.ops.linear.mosaic_gpu import linear_backward, linear_forward
from pallas_kernels.ops.linear.reference import given_product, linear_reference, linear_residual_norm_reference
from pallas_kernels.spec_builders import as_taken, both_passes, traffic, variants
from pallas_kernels.specs import ArgSpec, Arguments, OpSpec


@product_call
def _call(x, *, outputs, **after):
    return outputs, {"x": x, "w": weight(x, outputs)}, epilogue(x, outputs, **after)


_WIDE = {"features": 4096, "outputs": 16384, "bias": True, "activation": "gelu_tanh"}
"""The first layer of an older transformer's feed-forward network."""


def _bench_calls(rows: int) -> tuple[ArgSpec, ...]:
    """Makes the calls of a Llama-3-8B block's linear layers, and one of an older transformer."""
    block = bench_tags(rows, block=True)
    return (
        _call(rows, features=4096, outputs=4096, tags=block),
        _call(rows, **_WIDE, tags=bench_tags(rows)),
        _call(rows, features=14336, outputs=4096, residual=True, tags=block),
    )


def _layer(arguments: Arguments) -> tuple[Layer, LayerArrays]:
    """Returns the layer of a call, and its arrays or their shapes."""
    arrays = LayerArrays(arguments["x"], arguments["w"], arguments.get("bias"), arguments.get("residual"))
    dtype = jnp.dtype(arguments.get("out_dtype") or arrays.x.dtype)
    return Layer(activation=optional_activation("linear", arguments.get("activation")), out_dtype=dtype), arrays


def _forward(*, config=None, **arguments):
    layer, arrays = _layer(arguments)
    y, _ = linear_forward(layer, arrays.by_rows(), config=config)
    return (y.reshape(*arrays.x.shape[:-1], -1),)


def _backward(implementation, arguments, cotangents):
    """Runs the backward pass with dy in place of the kept product, which has the same shape and dtype."""
    x, w, bias, activation = as_rows(arguments["x"]), *(arguments.get(name) for name in ("w", "bias", "activation"))
    dy = as_rows(cotangents[0])
    if implementation == "mosaic":
        function = optional_activation("linear", activation)
        gradients = linear_backward(x, w, bias, dy, dy.astype(x.dtype), activation=function)
    else:
        given = {"activation": activation, "out_dtype": dy.dtype, "multiply": given_product}
        dz, dbias = jax.vjp(lambda rows, bias: linear_reference(rows, w, bias=bias, **given), dy, bias)[1](dy)
        gradients = *jax.vjp(jnp.matmul, x, w)[1](dz.astype(x.dtype)), dbias
    dx, *rest = gradients
    return tuple(value for value in (dx.reshape(arguments["x"].shape), *rest) if value is not None)


_BACKWARD_TRAFFIC = traffic(read=("x", "w", "y", "kept"), written=("x", "w"), y=result_bytes(), kept=kept_bytes)

LINEAR = OpSpec(
    name="linear",
    function=linear,
    reference=linear_reference,
    implementations=("mosaic", "triton", "xla"),
    differentiable=("x", "w", "bias", "residual"),
    batched=("x", "residual"),
    arg_specs=(
        _call(2, 72, features=128, outputs=192, bias=True, activation="gelu_tanh", residual=True),
        _call(130, features=192, outputs=320),
        _call(40, features=64, outputs=128, dtype="float16", residual=True, out_dtype="float32"),
        _call(5, features=100, outputs=96, tags="test ragged"),
        _call(0, features=64, outputs=128, tags="test empty"),
        _call(24, features=64, outputs=128, bias=True, activation="quick_gelu"),
        _call(24, features=64, outputs=128, fill="zeros", activation="gelu", tags="test extreme"),
        _call(777, features=1024, outputs=4032, bias=True, activation="gelu_tanh", tags="gpu"),
        _call(2, 300, features=2048, outputs=2048, dtype="float16", bias=True, activation="relu_squared", tags="gpu"),
        _call(515, features=4160, outputs=1088, residual=True, bias=True, tags="gpu"),
        _call(500, features=1024, outputs=14272, bias=True, activation="gelu_tanh", residual=True, tags="gpu"),
        _call(256, features=1024, outputs=4096, out_dtype="float32", residual=True, tags="gpu"),
        _call(17, features=1024, outputs=4096, bias=True, activation="silu", residual=True, tags="gpu"),
        _call(600, features=1024, outputs=4096, bias=True, activation="quick_gelu", tags="gpu"),
        _call(64, features=16384, outputs=512, tags="gpu"),
        *(call for rows in (8192, 512, 16, 1) for call in _bench_calls(rows)),
    ),
    forward_traffic=traffic(read=("x", "w", "residual"), written=("y",), y=result_bytes()),
    backward_traffic=_BACKWARD_TRAFFIC,
    backward=_backward,
    variants=variants((_forward, lambda arguments: candidates(rows_of(arguments)))),  # backward products are XLA's
    tuned_key=lambda arguments: tuned_key(*_layer(arguments)),
    flops=product_flops,
)


@product_call
def _norm_call(x, *, outputs, norm="rms", scaled=True, mean_square=False, rounds=False, **after):
    norm_part = norm_arguments(x, norm, scaled=scaled, mean_square=mean_square, rounds=rounds)
    return outputs, {"x": x, "w": weight(x, outputs)}, norm_part, epilogue(x, outputs, **after)


_NORM_DIFFERENTIABLE = ("x", "w", "bias", *NORM_ARRAYS)
_NORM_LINEAR = as_taken(norm_linear, with_norm)

NORM_LINEAR = OpSpec(
    name="norm_linear",
    function=_NORM_LINEAR,
    reference=as_taken(linear_reference, with_norm),
    differentiable=_NORM_DIFFERENTIABLE,
    batched=("x", "mean_square"),
    arg_specs=(
        _norm_call(2, 3, features=128, outputs=192, bias=True, activation="gelu_tanh"),
        _norm_call(4, features=128, outputs=128, dtype="float16", norm="layer"),
        _norm_call(40, features=128, outputs=128, scaled=False, mean_square=True, bias=True, activation="silu"),
        _norm_call(40, features=192, outputs=128, mean_square=True),
        _norm_call(40, features=192, outputs=128, mean_square=True, rounds=True),
        _norm_call(4, features=128, outputs=128, norm="layer", rounds=True),
        _norm_call(2, features=100, outputs=96, dtype="float32", bias=True, activation="gelu_tanh", tags="test ragged"),
        _norm_call(0, features=128, outputs=128, tags="test empty"),
        _norm_call(1000, features=4096, outputs=1024, tags="gpu"),
        _norm_call(777, features=1024, outputs=4032, norm="layer", bias=True, activation="gelu_tanh", tags="gpu"),
        _norm_call(600, features=1024, outputs=2048, scaled=False, mean_square=True, activation="silu", tags="gpu"),
        _norm_call(17, features=1024, outputs=4096, bias=True, tags="gpu"),
        _norm_call(13, features=2048, outputs=4096, bias=True, activation="silu", tags="gpu"),
        _norm_call(9, features=2048, outputs=14336, tags="gpu"),
        *(_norm_call(rows, features=4096, outputs=4096, tags="gpu bench") for rows in (8192, 512, 16, 1)),
        *(_norm_call(rows, **_WIDE, norm="layer", tags="gpu bench") for rows in (8192, 512)),
    ),
    forward_traffic=traffic(read=("x", "w"), written=("y",), y=result_bytes()),
    backward_traffic=_BACKWARD_TRAFFIC,
    backward=both_passes(_NORM_LINEAR, *_NORM_DIFFERENTIABLE),
    flops=product_flops,
)


@product_call
def _residual_norm_call(x, *, outputs, bias=False):
    residual, _ = epilogue(x, outputs, residual=True)
    return outputs, {"x": x, "w": weight(x, outputs), **residual}, epilogue(x, outputs, bias=bias)


_RESIDUAL_NORM_DIFFERENTIABLE = ("x", "w", "bias", "residual")

LINEAR_RESIDUAL_NORM = OpSpec(
    name="linear_residual_norm",
    function=linear_residual_norm,
    reference=linear_residual_norm_reference,
    differentiable=_RESIDUAL_NORM_DIFFERENTIABLE,
    batched=("x", "residual"),
    arg_specs=(
        _residual_norm_call(2, 5, features=64, outputs=320, bias=True),
        _residual_norm_call(130, features=64, outputs=128, dtype="float16"),
        _residual_norm_call(5, features=100, outputs=96, dtype="float32", bias=True, tags="test ragged"),
        _residual_norm_call(0, features=64, outputs=128, tags="test empty"),
        _residual_norm_call(1000, features=4096, outputs=1024, tags="gpu"),
        _residual_norm_call(777, features=1024, outputs=4032, bias=True, tags="gpu"),
        _residual_norm_call(600, features=1024, outputs=1088, dtype="float16", tags="gpu"),
        _residual_norm_call(17, features=1024, outputs=4096, bias=True, tags="gpu"),
        *(_residual_norm_call(rows, features=14336, outputs=4096, tags="gpu bench") for rows in (8192, 512, 16, 1)),
        *(_residual_norm_call(rows, features=4096, outputs=4096, tags="gpu bench") for rows in (8192, 512)),
    ),
    forward_traffic=traffic(read=("x", "w", "residual"), written=("residual",)),
    backward_traffic=traffic(read=("x", "w", "residual", "residual"), written=("x", "w", "residual")),
    backward=both_passes(linear_residual_norm, *_RESIDUAL_NORM_DIFFERENTIABLE),
    flops=product_flops,
)
