"""Batch normalisation backward on Mosaic GPU: one launch for the column sums, a small one to join them, one for
dx.

With v = (x - mean) / deviation, deviation = sqrt(variance + epsilon) and n rows,

    dbias = sum of dy,   dscale = sum of dy * v,   dx = scale / deviation * (dy - dbias / n - v * dscale / n)

and the cotangents of mean and variance add dmean / n + 2 (x - mean) dvariance / n. All of it is a column's three
numbers: dx = slope * dy + across * (x - mean) + offset. Of few rows, whose variance may be as small as epsilon and the
slope large, the mean of dy is taken off each dy first: what is left is small, and of one row exactly zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.batch_norm.columns import apply_columns, sum_columns
from pallas_kernels.ops.batch_norm.config import BatchNormConfig, default_config
from pallas_kernels.ops.batch_norm.few_rows import HELD_ROWS, sum_few_rows


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
        if dvariance is not None:
            across += 2.0 * columns["dvariance"]
        if dmean is not None:
            offset += columns["dmean"]
        across, offset = across * (1.0 / rows), offset * (1.0 / rows)
        return {"dscale": dscale, "dbias": dbias, "slope": slope, "across": across, "offset": offset}

    def differentiate(values):
        return values["slope"] * values["dy"] + values["across"] * (values["x"] - values["mean"]) + values["offset"]

    def finish_few_rows(state, columns):
        numbers = finish((jnp.zeros_like(state[0]), state[1]), columns)
        return {**numbers, "dbias": state[0], "dy_mean": state[0] * (1.0 / rows)}

    def differentiate_few_rows(values):
        return differentiate({**values, "dy": values["dy"] - values["dy_mean"]})

    columns = {"scale": scale, "variance": variance, "dmean": dmean, "dvariance": dvariance}
    columns = {name: value for name, value in columns.items() if value is not None}
    out_types = {"dscale": scale.dtype, "dbias": jnp.float32}
    if config is None and rows <= HELD_ROWS:
        found = sum_few_rows(
            "batch_norm_gradient_few_rows",
            arrays,
            {"mean": mean, **columns},
            passes=(lambda values, _: _products(values),),
            finish=finish_few_rows,
            step=differentiate_few_rows,
            out_types=out_types,
        )
        return found["result"], found["dscale"], found["dbias"]
    config = config or default_config(rows, x.shape[1], x.dtype.itemsize, arrays=2)
    partials = sum_columns("batch_norm_gradient_sums", arrays, {"mean": mean}, _products, config=config)
    found = sum_few_rows(
        "batch_norm_gradient_merge",
        (("dy", "products"), partials.found),
        columns,
        passes=(lambda values, _: (values["dy"], values["products"]),),
        finish=finish,
        out_types={**out_types, **dict.fromkeys(("slope", "across", "offset"), jnp.float32)},
    )
    columns = {"mean": mean, **{name: found[name] for name in ("slope", "across", "offset")}}

    dx = apply_columns("batch_norm_gradient", arrays, columns, differentiate, config=config)
    return dx, found["dscale"], found["dbias"]


def _products(values):
    return values["dy"], values["dy"] * (values["x"] - values["mean"])
