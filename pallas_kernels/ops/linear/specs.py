"""The linear layer's registry entry."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.checks import optional_activation
from pallas_kernels.ops._products.norm import as_rows
from pallas_kernels.ops._products.product import candidates
from pallas_kernels.ops._products.specs import (
    bench_tags,
    epilogue,
    flat,
    kept_bytes,
    product_call,
    product_flops,
    result_bytes,
    rows_of,
    weight,
)
from pallas_kernels.ops.linear.api import linear
from pallas_kernels.ops.linear.config import tuned_key
from pallas_kernels.ops.linear.mosaic_gpu import linear_forward
from pallas_kernels.ops.linear.mosaic_gpu_vjp import linear_backward
from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.spec_builders import backward_passes, gradients_of, traffic, variants
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


def _forward(*, x, w, bias=None, activation=None, residual=None, out_dtype=None, config=None):
    function, dtype = optional_activation("linear", activation), jnp.dtype(out_dtype or x.dtype)
    y, _ = linear_forward(as_rows(x), w, bias, flat(residual), activation=function, out_dtype=dtype, config=config)
    return (y.reshape(*x.shape[:-1], -1),)


def _given(x, *gradients):
    dx, *rest = gradients
    return tuple(value for value in (dx.reshape(x.shape), *rest) if value is not None)


def _backward(*, x, w, cotangents, bias=None, activation=None, residual=None, out_dtype=None):
    """Runs the backward pass with dy in place of the kept product, which has the same shape and dtype."""
    dy, function = as_rows(cotangents[0]), optional_activation("linear", activation)
    product = None if activation is None else dy
    return _given(x, *linear_backward(as_rows(x), w, bias, product, dy.astype(x.dtype), activation=function)[:3])


def _triton_backward(*, x, w, cotangents, bias=None, activation=None, residual=None, out_dtype=None):
    """Runs the Triton backward pass with dy in place of the kept product, as above."""
    from pallas_kernels.ops.linear.triton import backward  # imports Triton

    dy = as_rows(cotangents[0])
    dx, dw, _, dbias = backward(as_rows(x), w, None, bias, dy, dy, activation=activation)
    return _given(x, dx, dw, dbias)


def _xla_backward(*, x, w, cotangents, bias=None, activation=None, residual=None, out_dtype=None):
    (dy,) = cotangents
    dtype = jnp.dtype(out_dtype or x.dtype)
    if activation is None:
        arrays = {"x": x, "w": w, "bias": bias, "out_dtype": dtype}
        return gradients_of(linear_reference, "x", "w", "bias")(**arrays, cotangents=(dy,))

    def rest(product, bias):  # from the kept product on; dy stands for it, as above
        wide = product.astype(jnp.float32)
        wide = wide if bias is None else wide + bias.astype(jnp.float32)
        return get_activation("linear", activation).reference(wide).astype(dtype)

    dz, dbias = jax.vjp(rest, dy.astype(x.dtype), bias)[1](dy)
    return _given(x, *gradients_of(linear_reference, "x", "w")(x=x, w=w, cotangents=(dz,)), dbias)


def _tuned_key(arguments: Arguments):
    x, dtype = arguments["x"], jnp.dtype(arguments.get("out_dtype") or arguments["x"].dtype)
    bias, activation, residual = (arguments.get(name) for name in ("bias", "activation", "residual"))
    return tuned_key(x, arguments["w"], bias, activation, residual, dtype)


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
        _call(1, features=192, outputs=192, bias=True),
        _call(5, features=100, outputs=96, tags="test ragged"),
        _call(0, features=64, outputs=128, tags="test empty"),
        _call(24, features=64, outputs=128, fill="zeros", activation="gelu", tags="test extreme"),
        _call(1000, features=4096, outputs=1024, tags="gpu"),
        _call(777, features=1024, outputs=4032, bias=True, activation="gelu_tanh", tags="gpu"),
        _call(2, 300, features=2048, outputs=2048, dtype="float16", bias=True, activation="relu_squared", tags="gpu"),
        _call(515, features=4160, outputs=1088, residual=True, bias=True, tags="gpu"),
        _call(500, features=1024, outputs=14272, bias=True, activation="gelu_tanh", residual=True, tags="gpu"),
        _call(256, features=1024, outputs=4096, out_dtype="float32", residual=True, tags="gpu"),
        _call(2, features=4096, outputs=4096, tags="gpu"),
        _call(17, features=1024, outputs=4096, bias=True, activation="silu", residual=True, tags="gpu"),
        _call(600, features=1024, outputs=4096, bias=True, activation="quick_gelu", tags="test gpu"),
        _call(64, features=16384, outputs=512, tags="gpu"),
        *(call for rows in (8192, 512, 16, 1) for call in _bench_calls(rows)),
    ),
    forward_traffic=traffic(read=("x", "w", "residual"), written=("y",), y=result_bytes()),
    backward_traffic=traffic(read=("x", "w", "y", "kept"), written=("x", "w"), y=result_bytes(), kept=kept_bytes),
    backward=backward_passes(mosaic=_backward, triton=_triton_backward, xla=_xla_backward),
    variants=variants((_forward, lambda arguments: candidates(rows_of(arguments)))),  # backward products are XLA's
    tuned_key=_tuned_key,
    flops=product_flops,
)
