"""Batch normalisation forward on Mosaic GPU: one launch for the statistics, a small one to join them, one to normalise.

The statistics need every row before the first result can be written, so x is read twice. Each block sums x and x**2
after subtracting the mean of a few of its own rows, so that little cancels however far the mean is from zero; a small
kernel in between joins what the blocks found, in a fixed order: first their means, to one rounded mean, then what they
have left from there, which corrects both moments. The second pass goes through the rows backwards, since those read
last are in the L2 cache yet. Few rows need one launch.

Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance: analysis and recommendations", 1983,
https://doi.org/10.1080/00031305.1983.10483115
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.batch_norm.columns import apply_columns, sum_columns
from pallas_kernels.ops.batch_norm.config import BatchNormConfig, default_config
from pallas_kernels.ops.batch_norm.few_rows import HELD_ROWS, sum_few_rows


def batch_norm_forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float, config: BatchNormConfig | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (y, mean, variance). x: (rows, features), features >= 128. scale, bias: (features,)."""
    rows = x.shape[0]

    def normalise(values):
        return (values["x"] - values["mean"]) * values["slope"] + values["bias"]

    def derive(mean, variance, columns):
        variance = jnp.maximum(variance, 0.0)
        slope = lax.rsqrt(variance + epsilon) * columns["scale"]
        return {"mean": mean, "variance": variance, "slope": slope, "bias": columns["bias"]}

    def near_mean(sums, values):
        """The mean rounded to a value that x may have, from which 16-bit values have exact distances."""
        mean = values["first"] + sums[0] * (1.0 / rows)
        return mean.astype(x.dtype).astype(jnp.float32)

    def finish(sums, columns):
        """The sums are of x, counted from `first`, and of deviations from `near_mean` and their squares."""
        near, left, squares = near_mean(sums, columns), sums[1] * (1.0 / rows), sums[2] * (1.0 / rows)
        # Of a column with an infinity the mean is infinite, and what is left of it NaN; of huge values the variance is.
        mean = jnp.where(jnp.abs(near) < jnp.inf, near + left, near)
        return derive(mean, jnp.where(squares < jnp.inf, squares - left * left, squares), columns)

    def deviations(values, sums):
        away = values["x"] - near_mean(sums, values)
        return away, jnp.square(away)

    parameters = {"scale": scale, "bias": bias}
    if config is None and rows <= HELD_ROWS:
        found = sum_few_rows(
            "batch_norm_few_rows",
            {"x": x},
            parameters,
            passes=(lambda values, _: (values["x"] - values["first"],), deviations),
            first_of="x",
            finish=finish,
            step=normalise,
            out_types=dict.fromkeys(("mean", "variance"), jnp.float32),
        )
        return found["result"], found["mean"], found["variance"]

    config = config or default_config(rows, x.shape[1], x.dtype.itemsize)
    partials = sum_columns("batch_norm_statistics", {"x": x}, {}, _moments, shifted="x", config=config)

    def group_total(values, sums):
        return (values["sums"] + values["count"] * (values["shift"] - values["first"]),)

    def group_deviations(values, sums):
        """What `deviations` gives, summed over a group, from its sums of distances from its shift."""
        away = values["shift"] - near_mean(sums, values)
        total = values["sums"] + values["count"] * away
        return total, values["squares"] + away * (values["sums"] + total)

    found = sum_few_rows(
        "batch_norm_merge",
        (("sums", "squares", "shift"), partials.found),
        parameters,
        passes=(group_total, group_deviations),
        finish=finish,
        out_types=dict.fromkeys(("mean", "variance", "slope", "bias"), jnp.float32),
        count_of=partials.split.count,
        first_of="shift",
    )
    columns = {name: found[name] for name in ("mean", "slope", "bias")}
    y = apply_columns("batch_norm", {"x": x}, columns, normalise, config=config)
    return y, found["mean"], found["variance"]


def _moments(values):
    return values["x"], jnp.square(values["x"])
