"""The public function: checks, dispatch, and the gradient of the Mosaic GPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.ops.batch_norm.mosaic_gpu import batch_norm_backward, batch_norm_forward
from pallas_kernels.ops.batch_norm.reference import batch_norm_reference
from pallas_kernels.primitives.checks import added_number, as_arrays, check_features
from pallas_kernels.primitives.elementwise import elementwise_unsupported
from pallas_kernels.primitives.operation import operation
from pallas_kernels.primitives.platform import dtypes_unsupported, mosaic_gpu_unsupported, varying_alike

MOST_XLA_ROWS = 64
"""Up to this number of rows, XLA computes the statistics, the result and the gradient: for 4096 features of 16 bits it
takes 7.7 µs forward, and three launches 10.9 (H200)."""


def _from_parts(arguments: Mapping[str, Any], sums: Mapping[str, Any]) -> Any:
    """Computes the norm where rows are cut: means are over all parts."""
    given = {name: value for name, value in arguments.items() if name != "implementation"}
    return batch_norm_reference(**given, over=sums["..."].axes)


@operation("x: +... d, scale: d, bias: d -> ... d, d, d", _from_parts)
def batch_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    epsilon: float = 1e-5,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalises each feature by its mean and variance over all rows, as in training.

    Equivalent to this, in float32 between the casts, where `axes` are all axes but the last:

        mean, variance = x.mean(axes), x.var(axes)
        y = (x - mean) * rsqrt(variance + epsilon) * scale + bias

    Args:
        x: (..., features), bfloat16, float16 or float32 (float64 with "xla").
        scale, bias: (features,), any floating dtype.
        epsilon: added to the variance; a non-negative Python number.
        implementation: one of the names below, a sequence of them in order of preference, or None.
            "mosaic": three Mosaic GPU kernels, for Hopper GPUs or `plgpu.force_gpu_interpret_mode`; at least 128
            features.
            "xla": always runs.
            None: "mosaic" for more than 64 rows if it can run, else "xla".

    Returns:
        (y, mean, variance): y with x's shape and dtype; mean and biased variance, (features,) float32. Under
        `jax.shard_map` each device has its own statistics.

    Raises:
        TypeError, ValueError: the arguments do not fit together, or the implementation is unknown.
        NotImplementedError: the requested implementation cannot run; the message says why.

    Source: Ioffe and Szegedy, "Batch Normalization", 2015, https://arxiv.org/abs/1502.03167
    """
    x, scale, bias = as_arrays("batch_norm", x=x, scale=scale, bias=bias)
    epsilon = added_number("batch_norm", "epsilon", epsilon)
    check_features("batch_norm", x, scale=scale, bias=bias)
    if x.ndim < 2:
        raise ValueError(f"batch_norm: x must be (..., features) with a leading axis to average over, got {x.shape}.")
    support = {"mosaic": partial(mosaic_unsupported, x, scale, bias), "xla": lambda: None}
    order = ("mosaic",) if x.size > MOST_XLA_ROWS * x.shape[-1] else ()
    chosen = choose("batch_norm", implementation, support, preferred=order)
    if chosen == "xla" or x.size == 0:
        return batch_norm_reference(x, scale, bias, epsilon=epsilon)
    operands = varying_alike((x.reshape(-1, x.shape[-1]), scale, bias))
    y, mean, variance = _batch_norm_mosaic(epsilon, *operands)  # pyright: ignore[reportGeneralTypeIssues]
    return y.reshape(x.shape), mean, variance


def mosaic_unsupported(x: jax.Array, scale: jax.Array, bias: jax.Array) -> str | None:
    """Returns why the Mosaic GPU kernels cannot take these arguments here, or None if they can."""
    if reason := dtypes_unsupported(x=x, scale=scale, bias=bias):
        return reason
    features = x.shape[-1]
    return elementwise_unsupported(x.size // max(1, features), features) or mosaic_gpu_unsupported()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _batch_norm_mosaic(
    epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return batch_norm_forward(x, scale, bias, epsilon=epsilon)


def _mosaic_fwd(epsilon, x, scale, bias):
    y, mean, variance = batch_norm_forward(x, scale, bias, epsilon=epsilon)
    # The backward pass needs only the bias's dtype, but residuals must be arrays.
    return (y, mean, variance), (x, scale, mean, variance, bias[:0])


def _mosaic_bwd(epsilon, saved, cotangents):
    x, scale, mean, variance, bias = saved
    dy, dmean, dvariance = cotangents
    dx, dscale, dbias = batch_norm_backward(x, scale, mean, variance, dy, dmean, dvariance, epsilon=epsilon)
    return dx, dscale, dbias.astype(bias.dtype)


_batch_norm_mosaic.defvjp(_mosaic_fwd, _mosaic_bwd)
