"""Sums and quotients of softmax whose rounding matters in float32 results.

Multiplying by the reciprocal rounds once more than dividing, with the same error for the whole row. Sixteen-bit
results are too coarse to show it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.rows import RowValues, map_row

MOST_EXACT = 8192
"""The longest row for which `exact_sum` has registers."""


def normalise(weights: RowValues, total: jax.Array, *, is_exact: bool) -> RowValues:
    """Returns weights / total; zeros for a fully masked row, whose total is 0.

    is_exact: whether to divide each weight; else it is multiplied by one reciprocal.
    """
    if is_exact:
        return map_row(lambda weight: quotient(weight, total), weights)
    inverse = jnp.where(total == 0, jnp.float32(0), 1 / total)
    return map_row(lambda weight: weight * inverse, weights)


def exact_sum(weights: RowValues, add: Callable[[RowValues], jax.Array]) -> jax.Array:
    """Sums a row of weights from 0 to 1 and rounds only once, at the end, in whatever order threads add.

    Whole 4096ths are summed as integers, and the sum of the remainders is too small for its rounding to matter.

    add: sums a row, in its dtype.
    """
    parts = map_row(lambda weight: (weight * 4096.0).astype(jnp.int32), weights)
    rests = map_row(lambda weight, part: weight - part.astype(jnp.float32) * (1 / 4096.0), weights, parts)
    return add(parts).astype(jnp.float32) * (1 / 4096.0) + add(rests)


def quotient(product: jax.Array, total: jax.Array) -> jax.Array:
    """Returns product / total; 0 for a fully masked row, where both are 0."""
    return product / jnp.where(total == 0, jnp.float32(1), total)


def remainder(mean: jax.Array, first: jax.Array) -> jax.Array:
    """Returns `mean`, the mean that remains after the mean `first` was subtracted, or 0 where almost nothing remains.

    It corrects the rounding of `first`, which shows if only few weights count. With a single weight almost nothing
    remains, and the gradient would be about 1e-23 times dy; float64 gives 0.
    """
    return jnp.where(jnp.abs(mean) < jnp.abs(first) * 2.0**-48, jnp.float32(0), mean)


def online_add(state: tuple[jax.Array, jax.Array], pieces: RowValues) -> tuple[jax.Array, jax.Array]:
    """Updates the running maxima and sums of exp(value - maximum) of online softmax, for each position separately.

    state: (maxima, sums), float32, each of the shape of the `pieces`. A step takes one exponential per value and one
    per position of the state. Exponentials are added in pairs before they are added to the sums. The maxima of all
    positions are combined at the end of a row.
    """
    before, totals = state
    highest = functools.reduce(jnp.maximum, pieces, before)
    weights = pairwise([jnp.exp(piece - highest) for piece in pieces])
    return highest, totals * jnp.exp(before - highest) + weights


def pairwise(values: list[jax.Array]) -> jax.Array:
    """Sums values pairwise."""
    while len(values) > 1:
        values = [sum(values[i + 1 : i + 2], start=values[i]) for i in range(0, len(values), 2)]
    return values[0]
