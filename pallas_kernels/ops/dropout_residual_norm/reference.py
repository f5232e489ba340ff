"""The operation in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops._norms.norm import NormName
from pallas_kernels.ops._norms.reference import norm_reference
from pallas_kernels.primitives.random import array_keep_mask


def dropout_residual_norm_reference(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array,
    rate: float,
    key: jax.Array | None,
    norm: NormName = "rms_norm",
    epsilon: float = 1e-6,
    rounds_before_scale: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.dropout_residual_norm`. Draws the same mask as the kernels."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    value = x.astype(wide)
    if rate and key is not None:
        value = jnp.where(array_keep_mask(key, x.shape, rate=rate), value * (1.0 / (1.0 - rate)), 0)
    total = (value + residual.astype(wide)).astype(x.dtype)
    options = {"epsilon": epsilon, "rounds_before_scale": rounds_before_scale}
    return norm_reference(total, scale, bias, is_centered=norm == "layer_norm", returns_total=True, **options)
