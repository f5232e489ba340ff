"""Grouped gated linear layers in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.gated_activation.reference import gated_activation_reference
from pallas_kernels.ops.grouped_linear.reference import grouped_product_reference


def grouped_gated_linear_reference(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    group_sizes: jax.Array,
    *,
    bias_gate: jax.Array | None = None,
    bias_up: jax.Array | None = None,
    activation: str = "silu",
) -> jax.Array:
    """See `pallas_kernels.grouped_gated_linear`. The products are rounded to x's dtype, what follows is in float32."""
    gate, is_own = grouped_product_reference(x, w_gate, group_sizes, bias=bias_gate)
    up, _ = grouped_product_reference(x, w_up, group_sizes, bias=bias_up)
    y = gated_activation_reference(gate, up, activation=activation)
    return jnp.where(is_own, y, 0).astype(x.dtype)
