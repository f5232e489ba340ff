"""The linear layer's registry entry: how it is called in tests and benchmarks, its traffic, and its variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.checks import optional_activation
from pallas_kernels.ops._products.specs import (
    behind_product,
    bench_tags,
    flat,
    product_bytes,
    product_call,
    product_flops,
    rows_of,
    weight,
)
from pallas_kernels.ops.linear.api import linear
from pallas_kernels.ops.linear.config import candidates, problem
from pallas_kernels.ops.linear.mosaic_gpu import linear_forward
from pallas_kernels.ops.linear.mosaic_gpu_vjp import linear_backward
from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.specs import GPU, ArgSpec, Arguments, ArraySpec, Fill, OpSpec, Traffic


def _call(
    *leading: int,
    features: int,
    outputs: int,
    dtype: str = "bfloat16",
    fill: Fill = "normal",
    tags: tuple[str, ...] = ("test",),
    **behind: Any,
) -> ArgSpec:
    """behind: as `behind_product` has them."""
    x = ArraySpec(shape=(*leading, features), dtype=dtype, fill=fill)
    operands = {"x": x, "w": weight(features, outputs, dtype)}
    return product_call(f"{features}-{outputs}", operands, behind_product(x, outputs, **behind), tags=tags)


def _bench_calls() -> tuple[ArgSpec, ...]:
    """A Llama-3-8B block's linear layers, and one of an older transformer, for training, short prompts and decoding."""
    specs = []
    for rows in (8192, 512, 16, 1):
        tags = bench_tags(rows)
        specs += [
            _call(rows, features=4096, outputs=4096, tags=(*tags, "block")),
            _call(rows, features=4096, outputs=16384, bias=True, activation="gelu_tanh", tags=tags),
            _call(rows, features=14336, outputs=4096, residual=True, tags=(*tags, "block")),
        ]
    return tuple(specs)


_ARG_SPECS = (
    _call(2, 72, features=128, outputs=192, bias=True, activation="gelu_tanh", residual=True),
    _call(130, features=192, outputs=320),
    _call(40, features=64, outputs=128, dtype="float16", residual=True, out_dtype="float32"),
    _call(1, features=192, outputs=192, bias=True),
    _call(5, features=100, outputs=96, tags=("test", "ragged")),
    _call(0, features=64, outputs=128, tags=("test", "empty")),
    _call(24, features=64, outputs=128, fill="zeros", activation="gelu", tags=("test", "extreme")),
    _call(1000, features=4096, outputs=1024, tags=GPU),
    _call(777, features=1024, outputs=4032, bias=True, activation="gelu_tanh", tags=GPU),
    _call(2, 300, features=2048, outputs=2048, dtype="float16", bias=True, activation="relu_squared", tags=GPU),
    _call(515, features=4160, outputs=1088, residual=True, bias=True, tags=GPU),
    _call(500, features=1024, outputs=14272, bias=True, activation="gelu_tanh", residual=True, tags=GPU),
    _call(256, features=1024, outputs=4096, out_dtype="float32", residual=True, tags=GPU),
    _call(2, features=4096, outputs=4096, tags=GPU),
    _call(17, features=1024, outputs=4096, bias=True, activation="silu", residual=True, tags=GPU),
    _call(64, features=16384, outputs=512, tags=GPU),
    *_bench_calls(),
)


def _result_bytes(arguments: Arguments) -> int:
    itemsize = jnp.dtype(arguments.get("out_dtype") or arguments["x"].dtype).itemsize
    return rows_of(arguments) * arguments["w"].shape[1] * itemsize


def _forward_traffic(arguments: Arguments) -> Traffic:
    read, _ = product_bytes(arguments, "w")
    result = _result_bytes(arguments)
    return Traffic(read=(*read, *(() if arguments.get("residual") is None else (result,))), written=(result,))


def _backward_traffic(arguments: Arguments) -> Traffic:
    read, _ = product_bytes(arguments, "w")
    result = _result_bytes(arguments)
    return Traffic(read=(*read, result, *((result,) if arguments.get("activation") else ())), written=tuple(read))


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    if phase == "backward":  # its products are XLA's
        return {}
    return {name: partial(_forward_variant, config=c) for name, c in candidates(rows_of(arguments)).items()}


def _forward_variant(*, x, w, bias=None, activation=None, residual=None, out_dtype=None, config=None):
    y, _ = linear_forward(
        x.reshape(-1, x.shape[-1]),
        w,
        bias,
        flat(residual),
        activation=optional_activation("linear", activation),
        out_dtype=jnp.dtype(out_dtype or x.dtype),
        config=config,
    )
    return (y.reshape(*x.shape[:-1], -1),)


def _backward_variant(*, x, w, cotangents, bias=None, activation=None, residual=None, out_dtype=None):
    (dy,) = cotangents
    rows = dy.reshape(-1, dy.shape[-1])
    # dy stands for the product that the forward pass keeps: of its shape and dtype, and as good a sample of values.
    dx, dw, dbias, _ = linear_backward(
        x.reshape(-1, x.shape[-1]),
        w,
        bias,
        None if activation is None else rows,
        rows.astype(x.dtype),
        activation=optional_activation("linear", activation),
    )
    return tuple(value for value in (dx.reshape(x.shape), dw, dbias) if value is not None)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    if implementation == "mosaic":
        return _backward_variant(**arguments, cotangents=cotangents)
    x, w, bias = arguments["x"], arguments["w"], arguments.get("bias")
    activation = arguments.get("activation")
    (dy,) = cotangents
    if implementation == "triton":
        from pallas_kernels.ops.linear.triton import backward  # imports Triton

        # From the kept product on, for which dy stands as above.
        rows, flat = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx, dw, _, dbias = backward(rows, w, None, bias, flat, flat, activation=activation)
        return tuple(value for value in (dx.reshape(x.shape), dw, dbias) if value is not None)
    dtype = jnp.dtype(arguments.get("out_dtype") or x.dtype)
    if activation is not None:  # from the kept product on, for which dy stands as above

        def rest(product, bias):
            wide = product.astype(jnp.float32)
            wide = wide if bias is None else wide + bias.astype(jnp.float32)
            return get_activation("linear", activation).reference(wide).astype(dtype)

        dz, dbias = jax.vjp(rest, dy.astype(x.dtype), bias)[1](dy)
        dx, dw = jax.vjp(lambda x, w: linear_reference(x, w), x, w)[1](dz)
        return tuple(value for value in (dx, dw, dbias) if value is not None)

    def forward(x, w, bias):
        return linear_reference(x, w, bias=bias, out_dtype=dtype)

    return tuple(value for value in jax.vjp(forward, x, w, bias)[1](dy) if value is not None)


def _problem(arguments: Arguments) -> Mapping[str, int | str]:
    x, dtype = arguments["x"], jnp.dtype(arguments.get("out_dtype") or arguments["x"].dtype)
    bias, activation, residual = (arguments.get(name) for name in ("bias", "activation", "residual"))
    return problem(x, arguments["w"], bias, activation, residual, dtype)


LINEAR = OpSpec(
    name="linear",
    function=linear,
    reference=linear_reference,
    implementations=("mosaic", "triton", "xla"),
    differentiable=("x", "w", "bias", "residual"),
    batched=("x", "residual"),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
    problem=_problem,
    flops=product_flops,
)
