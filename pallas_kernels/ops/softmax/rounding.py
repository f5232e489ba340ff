"""Sums and quotients of softmax for results in float32, where every rounding shows.

Against a division, a product with the reciprocal rounds once more, and the reciprocal's error is the same for a whole
row. Sixteen-bit results do not show it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.rows import RowValues, Segment, map_row, row_sum

MOST_EXACT = 8192
"""The longest row of which `sum_of_weights` has registers for an exact sum."""


def normalise(weights: RowValues, total: jax.Array, *, is_exact: bool) -> RowValues:
    """weights / total, and zeros of a row that is masked throughout, whose total is 0.

    `is_exact`: by a division each, else by products with one reciprocal.
    """
    if is_exact:
        return map_row(lambda weight: quotient(weight, total), weights)
    inverse = jnp.where(total == 0, jnp.float32(0), 1 / total)
    return map_row(lambda weight: weight * inverse, weights)


def sum_of_weights(weights: RowValues, segments: Sequence[Segment], *, is_exact: bool) -> jax.Array:
    """The sum of a row of weights from 0 to 1.

    `is_exact`: rounded only at its end, in whatever order threads add: whole 4096ths are counted in integers, and the
    rests' sum is too small for its rounding to show.
    """
    if not is_exact:
        return row_sum(weights, segments)
    parts = map_row(lambda weight: (weight * 4096.0).astype(jnp.int32), weights)
    rests = map_row(lambda weight, part: weight - part.astype(jnp.float32) * (1 / 4096.0), weights, parts)
    return row_sum(parts, segments).astype(jnp.float32) * (1 / 4096.0) + row_sum(rests, segments)


def quotient(product: jax.Array, total: jax.Array) -> jax.Array:
    """product / total, and 0 for a row that is masked throughout, of which both are 0."""
    return product / jnp.where(total == 0, jnp.float32(1), total)


def remainder(mean: jax.Array, first: jax.Array) -> jax.Array:
    """`mean`, of what was left once the mean `first` was taken off: what `first` was rounded by, which shows where few
    weights count.

    A row of one weight has almost nothing left, and a gradient of about 1e-23 times dy: 0, as float64 makes it.
    """
    return jnp.where(jnp.abs(mean) < jnp.abs(first) * 2.0**-48, jnp.float32(0), mean)


def online_add(state: tuple[jax.Array, jax.Array], pieces: RowValues) -> tuple[jax.Array, jax.Array]:
    """One step of online softmax, each place for itself: running maxima and sums of exp(value - maximum).

    state: (maxima, sums), float32, of one shape with each of `pieces`. A step takes one exponential for each value and
    one for each place of the state; exponentials are added up in pairs before they join the sums. The maxima of
    different places are brought together at the end of a row.
    """
    before, totals = state
    highest = functools.reduce(jnp.maximum, pieces, before)
    weights = [jnp.exp(piece - highest) for piece in pieces]
    while len(weights) > 1:
        weights = [sum(weights[i + 1 : i + 2], start=weights[i]) for i in range(0, len(weights), 2)]
    return highest, totals * jnp.exp(before - highest) + weights[0]
