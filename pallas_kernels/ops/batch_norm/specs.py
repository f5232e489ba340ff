"""Batch normalisation's registry entry: how it is called in tests and benchmarks, its traffic, and its variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.batch_norm.api import batch_norm
from pallas_kernels.ops.batch_norm.columns import candidates
from pallas_kernels.ops.batch_norm.mosaic_gpu import batch_norm_backward, batch_norm_forward
from pallas_kernels.ops.batch_norm.reference import batch_norm_reference
from pallas_kernels.specs import (
    BENCH,
    GPU,
    ArgSpec,
    Arguments,
    ArraySpec,
    Fill,
    OpSpec,
    Traffic,
    array_bytes,
    call_name,
)

_EPSILON = 1e-5


def _call(
    *shape: int,
    dtype: str = "bfloat16",
    parameter_dtype: str | None = None,
    mean: float = 0.5,
    fill: Fill = "normal",
    tags: tuple[str, ...] = ("test",),
) -> ArgSpec:
    parameter = ArraySpec(shape=shape[-1:], dtype=parameter_dtype or dtype, mean=1.0, deviation=0.3)
    scale_dtype = parameter_dtype and f"{parameter_dtype}_scale"
    name = call_name(shape, dtype, scale_dtype, mean != 0.5 and f"mean_{mean:g}", fill=fill)
    arguments = {
        "x": ArraySpec(shape=shape, dtype=dtype, fill=fill, mean=mean),
        "scale": parameter,
        "bias": parameter,
    }
    return ArgSpec(name=name, arguments=arguments, tags=frozenset(tags))


_ARG_SPECS = (
    _call(9, 512),
    _call(3, 3, 300, dtype="float32"),
    _call(6, 1152, parameter_dtype="float32"),
    _call(5, 257, dtype="float16"),
    _call(24, 128, dtype="float32", mean=100.0),
    _call(72, 1024),
    _call(66, 300, dtype="float32", mean=100.0),
    _call(1, 256, dtype="float32"),
    _call(8, 127, tags=("test", "ragged")),
    _call(8, 256, fill="extreme", tags=("test", "extreme")),
    _call(6, 256, fill="ones", tags=("test", "extreme")),
    _call(4, 0, tags=("test", "empty")),
    _call(2000, 1024, tags=GPU),
    _call(1999, 4097, tags=GPU),
    _call(3000, 1152, dtype="float32", mean=100.0, tags=GPU),
    _call(777, 8192, parameter_dtype="float32", tags=GPU),
    _call(32768, 1024, tags=(*BENCH, "block")),
    _call(32768, 4096, tags=BENCH),
    _call(8192, 8192, tags=BENCH),
    _call(16384, 4096, dtype="float32", tags=BENCH),
    _call(64, 4096, tags=BENCH),
)


def _forward_traffic(arguments: Arguments) -> Traffic:
    # Twice: no result can be written before the statistics have seen every row.
    size = array_bytes(arguments["x"])
    return Traffic(read=(size,) * 2, written=(size,))


def _backward_traffic(arguments: Arguments) -> Traffic:
    size = array_bytes(arguments["x"])
    return Traffic(read=(size,) * 4, written=(size,))


def _variants(phase: str, arguments: Arguments) -> Mapping[str, Callable[..., Any]]:
    del arguments
    variant = _forward_variant if phase == "forward" else _backward_variant
    return {name: partial(variant, config=config) for name, config in candidates().items()}


def _forward_variant(*, x, scale, bias, config):
    return batch_norm_forward(x.reshape(-1, x.shape[-1]), scale, bias, epsilon=_EPSILON, config=config)


def _backward_variant(*, x, scale, bias, cotangents, config=None):
    """As in training: the statistics are there, and have no cotangents."""
    rows = x.reshape(-1, x.shape[-1])
    dy = cotangents[0].reshape(rows.shape)
    # Any statistics take the same time; these are close to the true ones, at no cost.
    mean, variance = jnp.full(scale.shape, 0.5, jnp.float32), jnp.ones(scale.shape, jnp.float32)
    dx, dscale, dbias = batch_norm_backward(
        rows, scale, mean, variance, dy, None, None, epsilon=_EPSILON, config=config
    )
    return dx.reshape(x.shape), dscale, dbias.astype(bias.dtype)


def _xla_backward(*, x, scale, bias, cotangents):
    """The same work from the same statistics, in plain jnp."""
    axes, rows = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
    mean, variance = jnp.full(scale.shape, 0.5, jnp.float32), jnp.ones(scale.shape, jnp.float32)
    inverse = jax.lax.rsqrt(variance + _EPSILON)
    dy, normal = cotangents[0].astype(jnp.float32), (x.astype(jnp.float32) - mean) * inverse
    dbias, dscale = jnp.sum(dy, axes), jnp.sum(dy * normal, axes)
    dx = inverse * scale.astype(jnp.float32) * (dy - (dbias + normal * dscale) * (1.0 / rows))
    return dx.astype(x.dtype), dscale.astype(scale.dtype), dbias.astype(bias.dtype)


def _backward(implementation: str, arguments: Arguments, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    if implementation == "mosaic":
        return _backward_variant(**arguments, cotangents=cotangents)

    return _xla_backward(**arguments, cotangents=cotangents)


BATCH_NORM = OpSpec(
    name="batch_norm",
    function=batch_norm,
    reference=batch_norm_reference,
    implementations=("mosaic", "xla"),
    differentiable=("x", "scale", "bias"),
    batched=("x",),
    arg_specs=_ARG_SPECS,
    forward_traffic=_forward_traffic,
    backward_traffic=_backward_traffic,
    backward=_backward,
    variants=_variants,
)
