"""Rotary position embedding in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rope_reference(
    query: jax.Array, key: jax.Array, positions: jax.Array, *, theta: float = 10000.0, interleaved: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.rope`. Angles and rotation in float32 (float64 for float64 inputs)."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    half = query.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=wide) / half)
    angle = positions.astype(wide)[..., None, None] * frequency  # (..., T, 1, half)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)

    def rotate(x):
        pair_axis = -1 if interleaved else -2
        pairs = x.astype(wide).reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
        first, second = jnp.take(pairs, 0, axis=pair_axis), jnp.take(pairs, 1, axis=pair_axis)
        rotated = (first * cosine - second * sine, second * cosine + first * sine)
        return jnp.stack(rotated, axis=pair_axis).reshape(x.shape).astype(x.dtype)

    return rotate(query), rotate(key)
