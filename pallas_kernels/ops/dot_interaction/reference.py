"""The dot interaction in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def dot_interaction_reference(features: jax.Array, *, self_interaction: bool = False) -> jax.Array:
    """See `pallas_kernels.dot_interaction`. Accumulates in float32 (float64 for float64 inputs)."""
    wide = jnp.promote_types(features.dtype, jnp.float32)
    products = jnp.einsum("...ik,...jk->...ij", features, features, preferred_element_type=wide)
    first, second = np.tril_indices(features.shape[-2], 0 if self_interaction else -1)
    return products[..., first, second].astype(features.dtype)
