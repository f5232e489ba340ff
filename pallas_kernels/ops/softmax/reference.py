"""Softmax in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def softmax_reference(
    x: jax.Array,
    *,
    axis: int = -1,
    scale: float | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """See `pallas_kernels.softmax`. Computes in float32 (float64 for float64 inputs)."""
    value = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if scale is not None:
        value = value * scale
    if mask is not None:
        value = jnp.where(mask, value, -jnp.inf) if mask.dtype == jnp.bool_ else value + mask.astype(value.dtype)
    if is_causal:
        queries, keys = x.shape[-2:]
        value = jnp.where(jnp.arange(keys) <= jnp.arange(queries)[:, None], value, -jnp.inf)
    # The maximum is -inf only if the whole row is masked. Then nothing is subtracted, and all weights are zero.
    maximum = jnp.max(value, axis=axis, keepdims=True, initial=-jnp.inf)
    maximum = jax.lax.stop_gradient(jnp.where(maximum == -jnp.inf, 0, maximum))
    weight = jnp.exp(value - maximum)
    total = jnp.sum(weight, axis=axis, keepdims=True)
    return (weight / jnp.where(total == 0, 1, total)).astype(x.dtype)
