"""The linear layer's registry entry."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.checks import optional_activation
from pallas_kernels.ops._products.layer import Layer, LayerArrays
from pallas_kernels.ops._products.norm import as_rows
from pallas_kernels.ops._products.specs import (
    bench_tags,
    epilogue,
    kept_bytes,
    product_call,
    product_flops,
    result_bytes,
    rows_of,
    weight,
)
from pallas_kernels.ops.linear.api import linear
from pallas_kernels.ops.linear.config import candidates, tuned_key
from pallas_kernels.ops.linear.mosaic_gpu import linear_backward, linear_forward
from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.spec_builders import traffic, variants
from pallas_kernels.specs import ArgSpec, Arguments, OpSpec


@product_call
def _call(x, *, outputs, **after):
    return outputs, {"x": x, "w": weight(x, outputs)}, epilogue(x, outputs, **after)


def _bench_calls(rows: int) -> tuple[ArgSpec, ...]:
    """Makes the calls of a Llama-3-8B block's linear layers, and one of an older transformer."""
    block = bench_tags(rows, block=True)
    return (
        _call(rows, features=4096, outputs=4096, tags=block),
        _call(rows, features=4096, outputs=16384, bias=True, activation="gelu_tanh", tags=bench_tags(rows)),
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
        given = {"activation": activation, "out_dtype": dy.dtype, "multiply": lambda rows, *_, **__: rows}
        dz, dbias = jax.vjp(lambda rows, bias: linear_reference(rows, w, bias=bias, **given), dy, bias)[1](dy)
        gradients = *jax.vjp(jnp.matmul, x, w)[1](dz.astype(x.dtype)), dbias
    dx, *rest = gradients
    return tuple(value for value in (dx.reshape(arguments["x"].shape), *rest) if value is not None)


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
        _call(24, features=64, outputs=128, fill="zeros", activation="gelu", tags="test extreme"),
        _call(777, features=1024, outputs=4032, bias=True, activation="gelu_tanh", tags="gpu"),
        _call(2, 300, features=2048, outputs=2048, dtype="float16", bias=True, activation="relu_squared", tags="gpu"),
        _call(515, features=4160, outputs=1088, residual=True, bias=True, tags="gpu"),
        _call(500, features=1024, outputs=14272, bias=True, activation="gelu_tanh", residual=True, tags="gpu"),
        _call(256, features=1024, outputs=4096, out_dtype="float32", residual=True, tags="gpu"),
        _call(17, features=1024, outputs=4096, bias=True, activation="silu", residual=True, tags="gpu"),
        _call(600, features=1024, outputs=4096, bias=True, activation="quick_gelu", tags="test gpu"),
        _call(64, features=16384, outputs=512, tags="gpu"),
        *(call for rows in (8192, 512, 16, 1) for call in _bench_calls(rows)),
    ),
    forward_traffic=traffic(read=("x", "w", "residual"), written=("y",), y=result_bytes()),
    backward_traffic=traffic(read=("x", "w", "y", "kept"), written=("x", "w"), y=result_bytes(), kept=kept_bytes),
    backward=_backward,
    variants=variants((_forward, lambda arguments: candidates(rows_of(arguments)))),  # backward products are XLA's
    tuned_key=lambda arguments: tuned_key(*_layer(arguments)),
    flops=product_flops,
)
