"""Sums and quotients of softmax for results in float32, where every rounding shows.

Against a division, a product with the reciprocal rounds once more, and the reciprocal's error is the same for a whole
row. Sixteen-bit results do not show it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.rows import RowValues, map_row


def normalise(weights: RowValues, total: jax.Array, *, is_exact: bool) -> RowValues:
    """weights / total, and zeros of a row that is masked throughout, whose total is 0.

    `is_exact`: with what the reciprocal was rounded by, which costs one more operation where a division costs ten.
    """
    inverse = jnp.where(total == 0, jnp.float32(0), 1 / total)
    if not is_exact:
        return map_row(lambda weight: weight * inverse, weights)
    rest = inverse * (1 - inverse * total)  # contracted to a fused multiply-add; else it corrects nothing
    return map_row(lambda weight: weight * inverse + weight * rest, weights)


def quotient(product: jax.Array, total: jax.Array) -> jax.Array:
    """product / total, and 0 for a row that is masked throughout, of which both are 0."""
    return product / jnp.where(total == 0, jnp.float32(1), total)


def online_add(state: tuple[jax.Array, jax.Array], pieces: RowValues) -> tuple[jax.Array, jax.Array]:
    """`rows.online_add`, with a step's exponentials added up in pairs before they join the sums."""
    before, totals = state
    highest = functools.reduce(jnp.maximum, pieces, before)
    weights = [jnp.exp(piece - highest) for piece in pieces]
    while len(weights) > 1:
        weights = [sum(weights[i + 1 : i + 2], start=weights[i]) for i in range(0, len(weights), 2)]
    return highest, totals * jnp.exp(before - highest) + weights[0]
