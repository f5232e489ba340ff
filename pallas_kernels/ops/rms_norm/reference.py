"""RMSNorm in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm_reference(
    x: jax.Array,
    scale: jax.Array,
    *,
    residual: jax.Array | None = None,
    returns_total: bool = False,
    epsilon: float = 1e-6,
    rounds_before_scale: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.rms_norm`. Accumulates in float32 (float64 for float64 inputs)."""
    total = x if residual is None else x + residual
    wide = jnp.promote_types(x.dtype, jnp.float32)
    value = total.astype(wide)
    mean_square = jnp.mean(jnp.square(value), axis=-1, keepdims=True)
    y = value * jax.lax.rsqrt(mean_square + epsilon)
    y = (y.astype(x.dtype) * scale if rounds_before_scale else y * scale.astype(wide)).astype(x.dtype)
    return (y, total) if returns_total or residual is not None else y
