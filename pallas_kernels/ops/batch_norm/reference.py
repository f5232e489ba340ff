"""Batch normalisation in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def batch_norm_reference(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, epsilon: float = 1e-5, over: tuple[str, ...] = ()
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.batch_norm`. Accumulates in float32 (float64 for float64 inputs).

    over: mesh axes whose devices have parts of the rows.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    value = x.astype(wide)
    axes = tuple(range(x.ndim - 1))
    mean = jax.lax.pmean(jnp.mean(value, axis=axes), over)
    variance = jax.lax.pmean(jnp.mean(jnp.square(value - mean), axis=axes), over)
    y = (value - mean) * jax.lax.rsqrt(variance + epsilon) * scale.astype(wide) + bias.astype(wide)
    return y.astype(x.dtype), mean, variance
