"""The embedding bag in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def embedding_bag_reference(
    table: jax.Array, indices: jax.Array, *, weights: jax.Array | None = None, mode: str = "sum"
) -> jax.Array:
    """See `pallas_kernels.embedding_bag`. Accumulates in float32 (float64 for float64 tables), gradients too."""
    wide = jnp.promote_types(table.dtype, jnp.float32)
    rows = jnp.take(table.astype(wide), indices, axis=0)
    if weights is not None:
        rows = rows * weights.astype(wide)[..., None]
    total = jnp.sum(rows, axis=-2)
    return (total / indices.shape[-1] if mode == "mean" else total).astype(table.dtype)
