"""Rotary position embedding in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rope_reference(
    query: jax.Array,
    key: jax.Array | None = None,
    positions: jax.Array | None = None,
    *,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    rotated: int | None = None,
    theta: float = 10000.0,
    interleaved: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.rope`. Angles and rotation in float32 (float64 for float64 inputs)."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    size = query.shape[-1] if rotated is None else rotated
    if positions is not None:
        frequency = theta ** (-jnp.arange(size // 2, dtype=wide) / (size // 2))
        angle = positions.astype(wide)[..., None] * frequency
        cos, sin = jnp.cos(angle), jnp.sin(angle)
    assert cos is not None and sin is not None
    cosines, sines = (_members(_by_token(table, query).astype(wide), size, interleaved) for table in (cos, sin))

    def rotate(x: jax.Array) -> jax.Array:
        first, second = _members(x[..., :size].astype(wide), size, interleaved)
        pairs = (first * cosines[0] - second * sines[0], second * cosines[1] + first * sines[1])
        y = jnp.stack(pairs, axis=-1 if interleaved else -2).reshape(*x.shape[:-1], size).astype(x.dtype)
        return y if size == x.shape[-1] else jnp.concatenate([y, x[..., size:]], axis=-1)

    return rotate(query) if key is None else (rotate(query), rotate(key))


def _by_token(table: jax.Array, query: jax.Array) -> jax.Array:
    """Gives a table (..., tokens, columns) an axis of heads, if it has none."""
    return table if table.ndim == query.ndim else table[..., None, :]


def _members(array: jax.Array, size: int, interleaved: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the first and the second of pairs; a table of one column a pair has the same for both."""
    if array.shape[-1] != size:
        return array, array
    return (array[..., 0::2], array[..., 1::2]) if interleaved else (array[..., : size // 2], array[..., size // 2 :])
