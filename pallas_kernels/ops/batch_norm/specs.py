"""Batch normalisation's registry entry."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.ops.batch_norm.api import batch_norm
from pallas_kernels.ops.batch_norm.mosaic_gpu import batch_norm_backward
from pallas_kernels.ops.batch_norm.reference import batch_norm_reference
from pallas_kernels.spec_builders import array_call, backward_passes, calls, traffic
from pallas_kernels.specs import ArraySpec, OpSpec

_EPSILON = 1e-5


@array_call
def _call(x, *, parameter_dtype=None, mean=0.5):
    parameter = ArraySpec(shape=x.shape[-1:], dtype=parameter_dtype or x.dtype, mean=1.0, deviation=0.3)
    arguments = {"x": replace(x, mean=mean), "scale": parameter, "bias": parameter}
    return arguments, parameter_dtype and f"{parameter_dtype}_scale", mean != 0.5 and f"mean_{mean:g}"


def _statistics(scale):
    """Returns made-up saved statistics close to the true ones; any values take the same time."""
    return jnp.full(scale.shape, 0.5, jnp.float32), jnp.ones(scale.shape, jnp.float32)


def _backward(*, x, scale, bias, cotangents):
    """Runs the backward pass as in training: with saved statistics, which have no cotangents."""
    rows = x.reshape(-1, x.shape[-1])
    arrays = (rows, scale, *_statistics(scale), cotangents[0].reshape(rows.shape))
    dx, dscale, dbias = batch_norm_backward(*arrays, None, None, epsilon=_EPSILON)
    return dx.reshape(x.shape), dscale, dbias.astype(bias.dtype)


def _xla_backward(*, x, scale, bias, cotangents):
    """Runs the same work from the same statistics, in plain jnp."""
    axes, rows = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
    mean, variance = _statistics(scale)
    inverse = jax.lax.rsqrt(variance + _EPSILON)
    dy, normal = cotangents[0].astype(jnp.float32), (x.astype(jnp.float32) - mean) * inverse
    dbias, dscale = jnp.sum(dy, axes), jnp.sum(dy * normal, axes)
    dx = inverse * scale.astype(jnp.float32) * (dy - (dbias + normal * dscale) * (1.0 / rows))
    return dx.astype(x.dtype), dscale.astype(scale.dtype), dbias.astype(bias.dtype)


BATCH_NORM = OpSpec(
    name="batch_norm",
    function=batch_norm,
    reference=batch_norm_reference,
    differentiable=("x", "scale", "bias"),
    batched=("x",),
    arg_specs=(
        _call(72, 512),
        _call(3, 3, 300, dtype="float32"),
        _call(5, 257, dtype="float16"),
        _call(24, 128, dtype="float32", mean=100.0),
        _call(66, 300, dtype="float32", mean=100.0),
        _call(1, 256, dtype="float32"),
        _call(8, 127, tags="test ragged"),
        _call(8, 256, fill="extreme", tags="test extreme"),
        _call(4, 0, tags="test empty"),
        *calls(_call, (2000, 1024), (1999, 4097), tags="gpu"),
        _call(3000, 1152, dtype="float32", mean=100.0, tags="gpu"),
        _call(777, 8192, parameter_dtype="float32", tags="gpu"),
        _call(32768, 1024, tags="gpu bench block"),
        *calls(_call, (32768, 4096), (8192, 8192), tags="gpu bench"),
        _call(16384, 4096, dtype="float32", tags="gpu bench"),
        _call(64, 4096, tags="gpu bench"),
    ),
    # Reads x twice: no result can be written before the statistics have seen every row.
    forward_traffic=traffic(read=("x",) * 2, written=("x",)),
    backward_traffic=traffic(read=("x",) * 4, written=("x",)),
    backward=backward_passes(mosaic=_backward, xla=_xla_backward),
)
