"""Linear layer and cross-entropy in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax

from pallas_kernels.ops.cross_entropy.reference import cross_entropy_reference
from pallas_kernels.ops.linear.reference import linear_reference


def linear_cross_entropy_reference(
    hidden: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int | None = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "none",
) -> jax.Array:
    """See `pallas_kernels.linear_cross_entropy`. The logits are an array of hidden's dtype."""
    return cross_entropy_reference(
        linear_reference(hidden, w),
        labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )
