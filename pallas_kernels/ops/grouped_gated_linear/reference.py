"""Grouped gated linear layers in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax

from pallas_kernels.ops.gated_activation.reference import gated_activation_reference
from pallas_kernels.ops.grouped_linear.reference import grouped_linear_reference


def grouped_gated_linear_reference(
    x: jax.Array, w_gate: jax.Array, w_up: jax.Array, group_sizes: jax.Array, *, activation: str = "silu"
) -> jax.Array:
    """See `pallas_kernels.grouped_gated_linear`. The products are rounded to x's dtype, the gating is in float32."""
    gate, up = (grouped_linear_reference(x, w, group_sizes) for w in (w_gate, w_up))
    return gated_activation_reference(gate, up, activation=activation)
