"""The layer in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.linear.reference import linear_reference


def linear_residual_norm_reference(
    x: jax.Array, w: jax.Array, *, residual: jax.Array, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.linear_residual_norm`. The mean squares are in float32 (float64 for float64 inputs)."""
    total = linear_reference(x, w, bias=bias, residual=residual)
    wide = jnp.promote_types(total.dtype, jnp.float32)
    return total, jnp.mean(jnp.square(total.astype(wide)), axis=-1)
