"""Decoding attention in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.attention.reference import attention_reference


def appended(cache: jax.Array, new: jax.Array, lengths: jax.Array, page_table: jax.Array | None) -> jax.Array:
    """Returns the cache with the newest tokens' entries `new` (B, T, K, D) at the sequences' ends."""
    sequence, tokens = jnp.arange(new.shape[0])[:, None], new.shape[1]
    size = cache.shape[1]
    keys = size if page_table is None else size * page_table.shape[1]
    position = jnp.clip(lengths, 0, keys)[:, None] - tokens + jnp.arange(tokens)
    entry = jnp.where(position < 0, size, position % size)  # entries behind the end are not written
    if page_table is not None:
        sequence = jnp.clip(page_table[sequence, position // size], 0, cache.shape[0] - 1)
    return cache.at[sequence, entry].set(new, mode="drop")


def decode_attention_reference(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    lengths: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    page_table: jax.Array | None = None,
    new_key: jax.Array | None = None,
    new_value: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.decode_attention`.

    Scores and softmax are in float32, weights are rounded to the values' dtype. With float64 inputs all is float64.
    """
    if new_key is not None and new_value is not None:
        caches = [
            appended(cache, new, lengths, page_table) for cache, new in ((key_cache, new_key), (value_cache, new_value))
        ]
        options = {"scale": scale, "window": window, "softcap": softcap, "page_table": page_table}
        return decode_attention_reference(query, *caches, lengths, **options), *caches  # pyright: ignore
    if page_table is not None:
        pages = jnp.clip(page_table, 0, key_cache.shape[0] - 1)
        key_cache, value_cache = (
            cache[pages].reshape(pages.shape[0], -1, *cache.shape[2:]) for cache in (key_cache, value_cache)
        )
    tokens, keys = query.shape[1], key_cache.shape[1]
    position = (jnp.clip(lengths, 0, keys)[:, None] - tokens + jnp.arange(tokens))[:, None, :, None]
    key = jnp.arange(keys)
    is_seen = key <= position
    if window is not None:
        is_seen &= key >= position - window
    return attention_reference(query, key_cache, value_cache, mask=is_seen, scale=scale, softcap=softcap)
