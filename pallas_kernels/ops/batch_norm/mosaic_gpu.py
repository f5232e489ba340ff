"""Batch normalisation forward on Mosaic GPU: one launch for the statistics, one to normalise.

The statistics need every row before the first result can be written, so x is read twice. Each block sums x and x**2
after subtracting the mean of a few of its own rows, so that little cancels however far the mean is from zero; XLA
merges the blocks' means and squared deviations (Chan), some hundred rows of them, in a fixed order.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979,
http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.batch_norm.columns import Partials, apply_columns, sum_columns
from pallas_kernels.ops.batch_norm.config import BatchNormConfig, default_config


def batch_norm_forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float, config: BatchNormConfig | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (y, mean, variance). x: (rows, features), features >= 128. scale, bias: (features,)."""
    config = config or default_config(x.shape[0], x.shape[1], x.dtype.itemsize)
    partials = sum_columns("batch_norm_statistics", {"x": x}, {}, _moments, shifted="x", config=config)
    mean, variance = _merge_blocks(partials)
    columns = {
        "mean": mean,
        "slope": jax.lax.rsqrt(variance + epsilon) * scale.astype(jnp.float32),
        "bias": bias.astype(jnp.float32),
    }

    def normalise(values):
        return (values["x"] - values["mean"]) * values["slope"] + values["bias"]

    return apply_columns("batch_norm", {"x": x}, columns, normalise, config=config), mean, variance


def _moments(values):
    return values["x"], jnp.square(values["x"])


def _merge_blocks(partials: Partials) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of all rows."""
    sums, squares = partials.sums
    assert partials.shift is not None
    counts = jnp.asarray(partials.counts[:, None], jnp.float32)
    rows = float(partials.counts.sum())
    # Relative to the first block's shift: differences of shifts are exact where the shifts themselves are large.
    base = partials.shift[0]
    means = (partials.shift - base) + sums / counts
    mean = jnp.sum(means * counts, axis=0) / rows
    deviations = squares - sums * (sums / counts)
    variance = jnp.sum(deviations + jnp.square(means - mean) * counts, axis=0) / rows
    return base + mean, jnp.maximum(variance, 0.0)
