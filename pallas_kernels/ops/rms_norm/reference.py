"""RMSNorm in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

_mean = partial(jnp.mean, axis=-1, keepdims=True)


def rms_norm_reference(
    x: jax.Array,
    scale: jax.Array,
    *,
    residual: jax.Array | None = None,
    returns_total: bool = False,
    epsilon: float = 1e-6,
    rounds_before_scale: bool = False,
    mean: Callable[[jax.Array], jax.Array] = _mean,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.rms_norm`. Accumulates in float32 (float64 for float64 inputs). mean: of rows."""
    total = x if residual is None else x + residual
    wide = jnp.promote_types(x.dtype, jnp.float32)
    value = total.astype(wide)
    mean_square = mean(jnp.square(value))
    y = value * jax.lax.rsqrt(mean_square + epsilon)
    y = (y.astype(x.dtype) * scale if rounds_before_scale else y * scale.astype(wide)).astype(x.dtype)
    return (y, total) if returns_total or residual is not None else y
