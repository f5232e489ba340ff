"""Batch normalisation backward on Mosaic GPU: one launch for the column sums, one for dx.

With v = (x - mean) / deviation, deviation = sqrt(variance + epsilon) and n rows,

    dbias = sum of dy,   dscale = sum of dy * v,   dx = scale / deviation * (dy - dbias / n - v * dscale / n)

and the cotangents of mean and variance add dmean / n + 2 (x - mean) dvariance / n. All of it is a column's three
numbers: dx = slope * dy + across * (x - mean) + offset.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.batch_norm.columns import apply_columns, sum_columns
from pallas_kernels.ops.batch_norm.config import BatchNormConfig, default_config


def batch_norm_backward(
    x: jax.Array,
    scale: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    dy: jax.Array,
    dmean: jax.Array | None,
    dvariance: jax.Array | None,
    *,
    epsilon: float,
    config: BatchNormConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (dx, dscale, dbias in float32). x, dy: (rows, features); the others (features,)."""
    rows = x.shape[0]
    config = config or default_config(x.shape[0], x.shape[1], x.dtype.itemsize)
    arrays = {"x": x, "dy": dy}
    partials = sum_columns("batch_norm_gradient_sums", arrays, {"mean": mean}, _products, config=config)
    dbias, products = (jnp.sum(value, axis=0) for value in partials.sums)
    inverse = jax.lax.rsqrt(variance + epsilon)
    dscale = products * inverse
    slope = inverse * scale.astype(jnp.float32)
    across, offset = -slope * dscale * inverse, -slope * dbias
    if dvariance is not None:
        across += 2.0 * dvariance
    if dmean is not None:
        offset += dmean
    columns = {"mean": mean, "slope": slope, "across": across * (1.0 / rows), "offset": offset * (1.0 / rows)}

    def differentiate(values):
        return values["slope"] * values["dy"] + values["across"] * (values["x"] - values["mean"]) + values["offset"]

    dx = apply_columns("batch_norm_gradient", arrays, columns, differentiate, config=config)
    return dx, dscale.astype(scale.dtype), dbias


def _products(values):
    return values["dy"], values["dy"] * (values["x"] - values["mean"])
