"""Batch normalisation on Mosaic GPU: one launch for column sums, a small one to add them, one for the rows.

Forward, the statistics need every row before the first result can be written, so x is read twice. Each block sums x and
x**2 after subtracting the mean of a few of its own rows, so that little cancels however far the mean is from zero. A
small kernel then joins the blocks' sums in a fixed order: first their means, to one rounded mean, then the deviations
from it, which correct both moments. The second pass goes through the rows backwards, since those read last are still in
the L2 cache.

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
    merge_groups,
    sum_columns,
)


def batch_norm_forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float, config: BatchNormConfig | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (y, mean, variance). x: (rows, features), features >= 128. scale, bias: (features,)."""
    rows, dtype = x.shape[0], x.dtype

    def normalise(values):
        return (values["x"] - values["mean"]) * values["slope"] + values["offset"]

    def near_mean(sums, values):
        """Rounds the mean to x's dtype, so that 16-bit values have exact differences from it."""
        mean = values["first"] + sums[0] * (1.0 / rows)
        return mean.astype(dtype).astype(jnp.float32)

    def finish(sums, columns):
        """Takes the sums of x - first, of the deviations from `near_mean`, and of their squares."""
        near, left, squares = near_mean(sums, columns), sums[1] * (1.0 / rows), sums[2] * (1.0 / rows)
        # A column with an infinity has an infinite mean and NaN deviations; huge values have an infinite variance.
        mean = jnp.where(jnp.abs(near) < jnp.inf, near + left, near)
        variance = jnp.maximum(jnp.where(squares < jnp.inf, squares - left * left, squares), 0.0)
        slope = lax.rsqrt(variance + epsilon) * columns["scale"]
        return {"mean": mean, "variance": variance, "slope": slope, "offset": columns["bias"]}

    config = config or default_config(rows, x.shape[1], x.dtype.itemsize)
    partials, split = sum_columns("batch_norm_statistics", {"x": x}, {}, _moments, shifted="x", config=config)

    def group_total(values, sums):
        return (values["sums"] + values["count"] * (values["shift"] - values["first"]),)

    def group_deviations(values, sums):
        """Returns a group's sums of deviations from `near_mean` and of their squares, from those from its shift."""
        away = values["shift"] - near_mean(sums, values)
        total = values["sums"] + values["count"] * away
        squares = values["squares"]
        # Squares of huge values are infinite, and so may their correction be, with the other sign.
        is_huge = (squares == jnp.inf) & (jnp.abs(away) < jnp.inf)
        return total, jnp.where(is_huge, squares, squares + away * (values["sums"] + total))

    found = merge_groups(
        "batch_norm_merge",
        partials,
        ("sums", "squares", "shift"),
        {"scale": scale, "bias": bias},
        passes=(group_total, group_deviations),
        finish=finish,
        out_types=dict.fromkeys(("mean", "variance", "slope", "offset"), jnp.float32),
        count_of=split.count,
        first_of="shift",
    )
    columns = {name: found[name] for name in ("mean", "slope", "offset")}
    y = apply_columns("batch_norm", {"x": x}, columns, normalise, config=config)
    return y, found["mean"], found["variance"]


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
    arrays = {"x": x, "dy": dy}

    def finish(state, columns):
        dbias, products = state
        inverse = lax.rsqrt(columns["variance"] + epsilon)
        dscale = products * inverse
        slope = inverse * columns["scale"]
        across, offset = -slope * dscale * inverse, -slope * dbias
        if "dvariance" in columns:
            across += 2.0 * columns["dvariance"]
        if "dmean" in columns:
            offset += columns["dmean"]
        across, offset = across * (1.0 / rows), offset * (1.0 / rows)
        return {"dscale": dscale, "dbias": dbias, "slope": slope, "across": across, "offset": offset}

    def differentiate(values):
        return values["slope"] * values["dy"] + values["across"] * (values["x"] - values["mean"]) + values["offset"]

    columns = {"scale": scale, "variance": variance, "dmean": dmean, "dvariance": dvariance}
    columns = {name: value for name, value in columns.items() if value is not None}
    out_types = {"dscale": scale.dtype, "dbias": jnp.float32}
    config = config or default_config(rows, x.shape[1], x.dtype.itemsize, arrays=2)
    partials, _ = sum_columns("batch_norm_gradient_sums", arrays, {"mean": mean}, _products, config=config)
    found = merge_groups(
        "batch_norm_gradient_merge",
        partials,
        ("dy", "products"),
        columns,
        passes=(lambda values, _: (values["dy"], values["products"]),),
        finish=finish,
        out_types={**out_types, **dict.fromkeys(("slope", "across", "offset"), jnp.float32)},
    )
    columns = {"mean": mean, **{name: found[name] for name in ("slope", "across", "offset")}}

    dx = apply_columns("batch_norm_gradient", arrays, columns, differentiate, config=config)
    return dx, found["dscale"], found["dbias"]


def _moments(values):
    return values["x"], jnp.square(values["x"])


def _products(values):
    return values["dy"], values["dy"] * (values["x"] - values["mean"])
