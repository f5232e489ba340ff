"""Blocks that share what one of them could sum: which part is whose, and the sum of what they make."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def lane_place(lane: jax.Array, heads: int, parts: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(batch entry, head, part of its work or None) of a lane."""
    part = None
    if parts > 1:
        lane, part = lax.div(lane, parts), lax.rem(lane, parts)
    return lax.div(lane, heads), lax.rem(lane, heads), part


def added(parts: jax.Array) -> jax.Array:
    """The sum over the first axis, in float32 and then rounded: one elementwise kernel."""
    whole, *others = parts.astype(jnp.float32)
    for other in others:
        whole = whole + other
    return whole.astype(parts.dtype)
