"""The bias and activation in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.activations import get_activation
from pallas_kernels.primitives.random import array_dropped


def bias_activation_reference(
    x: jax.Array,
    bias: jax.Array | None,
    *,
    activation: str = "gelu_tanh",
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """See `pallas_kernels.bias_activation`. Computes in float32 (float64 for float64 inputs)."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    value = x.astype(wide) if bias is None else x.astype(wide) + bias.astype(wide)
    y = get_activation("bias_activation", activation).reference(value)
    if dropout_rate and dropout_key is not None:
        y = array_dropped(y, dropout_key, rate=dropout_rate)
    if residual is not None:
        y = y + residual.astype(wide)
    return y.astype(x.dtype)
