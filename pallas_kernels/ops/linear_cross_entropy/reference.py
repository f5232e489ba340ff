"""Linear layer and cross-entropy in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.ops.cross_entropy.reference import cross_entropy_reference
from pallas_kernels.ops.linear.reference import linear_reference


def linear_cross_entropy_reference(
    hidden: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    **options: Any,
) -> jax.Array:
    """See `pallas_kernels.linear_cross_entropy`. The logits are an array of hidden's dtype.

    options: of `cross_entropy_reference`.
    """
    return cross_entropy_reference(linear_reference(hidden, w), labels, **options)
