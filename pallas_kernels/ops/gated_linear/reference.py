"""The gated linear layer in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Norm
from pallas_kernels.ops._products.norm import as_rows, norm_reference
from pallas_kernels.primitives.activations import get_activation


def gated_linear_reference(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    bias_gate: jax.Array | None = None,
    bias_up: jax.Array | None = None,
    activation: str = "silu",
    norm: Norm | None = None,
) -> jax.Array:
    """See `pallas_kernels.gated_linear`.

    Rounds the normalised x and the products to x's dtype; the rest is in float32 (float64 for float64 inputs).
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rows = as_rows(norm_reference(norm, x))
    gate, up = jnp.matmul(rows, w_gate).astype(wide), jnp.matmul(rows, w_up).astype(wide)
    gate = gate if bias_gate is None else gate + bias_gate.astype(wide)
    up = up if bias_up is None else up + bias_up.astype(wide)
    y = (get_activation("gated_linear", activation).reference(gate) * up).astype(x.dtype)
    return y.reshape(*x.shape[:-1], w_gate.shape[1])
