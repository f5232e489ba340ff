"""The gated activation in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.activations import get_activation


def gated_activation_reference(gate: jax.Array, up: jax.Array | None = None, *, activation: str = "silu") -> jax.Array:
    """See `pallas_kernels.gated_activation`. Computes in float32 (float64 for float64 inputs)."""
    function = get_activation("gated_activation", activation).reference
    if up is None:
        gate, up = jnp.split(gate, 2, axis=-1)
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    return (function(gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)
