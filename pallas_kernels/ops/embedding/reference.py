"""The embedding lookup in `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def gather_rows(table: jax.Array, ids: jax.Array, mode: str) -> jax.Array:
    """Returns the table's rows by index; `jnp.take` does not have the mode "promise_in_bounds"."""
    if mode == "promise_in_bounds":
        return table.at[ids].get(mode=mode)
    return jnp.take(table, ids, axis=0, mode=mode)


def embedding_reference(
    table: jax.Array, ids: jax.Array, *, mode: str = "fill", dtype: DTypeLike | None = None
) -> jax.Array:
    """See `pallas_kernels.embedding`. The gradient's sums are float32 (float64 for float64 tables)."""
    wide = jnp.promote_types(table.dtype, jnp.float32)
    return gather_rows(table.astype(wide), ids, mode).astype(table.dtype if dtype is None else dtype)
