"""The low-rank corrected linear layer in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.norm import as_rows


def lora_linear_reference(
    x: jax.Array,
    w: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    alpha: float = 1.0,
    bias: jax.Array | None = None,
) -> jax.Array:
    """See `pallas_kernels.lora_linear`. Products are rounded to x's dtype, what follows is in float32 or float64."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rows = as_rows(x)
    y = (rows @ w).astype(wide) + alpha * ((rows @ a) @ b).astype(wide)
    if bias is not None:
        y = y + bias.astype(wide)
    return y.astype(x.dtype).reshape(*x.shape[:-1], w.shape[1])
