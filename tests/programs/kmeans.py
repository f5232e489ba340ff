"""Ten steps of k-means: distances of all points and centres, the nearest centre, means of the points of each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

POINTS, SIZE, CENTRES, STEPS = 65536, 64, 512, 10


def step(points: Array, centres: Array) -> Array:
    def advance(_: Any, centres: Array) -> Array:
        squares = jnp.square(points).sum(-1)[:, None]
        nearest = jnp.argmin(squares - 2 * points @ centres.T + jnp.square(centres).sum(-1), -1)
        sums = jax.ops.segment_sum(points, nearest, CENTRES)
        counts = jax.ops.segment_sum(jnp.ones(POINTS), nearest, CENTRES)[:, None]
        return jnp.where(counts > 0, sums / jnp.maximum(counts, 1), centres)

    return jax.lax.fori_loop(0, STEPS, advance, centres)


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    return array(POINTS, SIZE), array(CENTRES, SIZE)
