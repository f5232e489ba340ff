"""Batch normalisation on Mosaic GPU: one launch for column sums, which XLA adds up, and one for the rows.

Forward, the statistics need every row before the first result can be written, so x is read twice. Each block sums x and
x**2 after subtracting the mean of a few of its own rows, so that little cancels however far the mean is from zero. XLA
then joins the blocks' sums in a fixed order: first their means, to one rounded mean, then the deviations from it, which
correct both moments. The second pass goes through the rows backwards, since those read last are still in the L2 cache.

Backward, with v = (x - mean) / deviation, deviation = sqrt(variance + epsilon) and n rows,

    dbias = sum of dy,   dscale = sum of dy * v,   dx = scale / deviation * (dy - dbias / n - v * dscale / n)

and the cotangents of mean and variance add dmean / n + 2 (x - mean) dvariance / n. So three numbers of each column
suffice: dx = slope * dy + across * (x - mean) + offset.

Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance: analysis and recommendations", 1983,
https://doi.org/10.1080/00031305.1983.10483115
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.batch_norm.columns import (
    BatchNormConfig,
    apply_columns,
    default_config,
    moderate_or_zero,
    sum_columns,
)
from pallas_kernels.primitives.settings import usual_promotion


def batch_norm_forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float, config: BatchNormConfig | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (y, mean, variance). x: (rows, features), features >= 128. scale, bias: (features,)."""
    config = config or default_config(x.shape[0], x.shape[1], x.dtype.itemsize)
    partials, split = sum_columns("batch_norm_statistics", {"x": x}, {}, _moments, shifted="x", config=config)
    mean, variance = _join(partials, split.count(jnp.arange(split.groups)), x)
    slope = lax.rsqrt(variance + epsilon) * scale.astype(jnp.float32)
    columns = {"mean": mean, "slope": slope, "bias": bias}

    def normalise(values):
        return (values["x"] - values["mean"]) * values["slope"] + values["bias"]

    return apply_columns("batch_norm", {"x": x}, columns, normalise, config=config), mean, variance


@usual_promotion
def _join(partials: jax.Array, counts: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance from each group's shift and its sums of distances from it and of their squares."""
    sums, squares, shift = (partials[:, i] for i in range(3))
    rows, counts, first = x.shape[0], counts[:, None].astype(jnp.float32), moderate_or_zero(shift[0])
    near = first + jnp.sum(sums + counts * (shift - first), axis=0) * (1.0 / rows)
    # Distances of 16-bit values from a mean of 16 bits are exact.
    finite = jnp.finfo(x.dtype)
    near = lax.reduce_precision(near, finite.bits - 1 - finite.nmant, finite.nmant)
    away = shift - near
    total = sums + counts * away
    # Squares of huge values are infinite, and so may their correction be, with the other sign.
    is_huge = (squares == jnp.inf) & (jnp.abs(away) < jnp.inf)
    squares = jnp.where(is_huge, squares, squares + away * (sums + total))
    left, squares = jnp.sum(total, axis=0) * (1.0 / rows), jnp.sum(squares, axis=0) * (1.0 / rows)
    # A column with an infinity has an infinite mean and NaN deviations; huge values have an infinite variance.
    mean = jnp.where(jnp.abs(near) < jnp.inf, near + left, near)
    return mean, jnp.maximum(jnp.where(squares < jnp.inf, squares - left * left, squares), 0.0)


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
    rows, arrays = x.shape[0], {"x": x, "dy": dy}
    config = config or default_config(x.shape[0], x.shape[1], x.dtype.itemsize, arrays=2)
    partials, _ = sum_columns("batch_norm_gradient_sums", arrays, {"mean": mean}, _products, config=config)
    dbias, products = jnp.sum(partials, axis=0)
    inverse = lax.rsqrt(variance + epsilon)
    dscale, slope = products * inverse, inverse * scale.astype(jnp.float32)
    across, offset = -slope * dscale * inverse, -slope * dbias
    across = across if dvariance is None else across + 2.0 * dvariance
    offset = offset if dmean is None else offset + dmean
    columns = {"mean": mean, "slope": slope, "across": across * (1.0 / rows), "offset": offset * (1.0 / rows)}

    def differentiate(values):
        return values["slope"] * values["dy"] + values["across"] * (values["x"] - values["mean"]) + values["offset"]

    dx = apply_columns("batch_norm_gradient", arrays, columns, differentiate, config=config)
    return dx, dscale.astype(scale.dtype), dbias


def _moments(values):
    return values["x"], jnp.square(values["x"])


def _products(values):
    return values["dy"], values["dy"] * (values["x"] - values["mean"])
