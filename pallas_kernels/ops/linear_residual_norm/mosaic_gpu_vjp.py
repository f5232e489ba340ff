"""The layer backward: the statistics' gradient joins that of the sum, then the linear layer's products."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.linear.mosaic_gpu_vjp import linear_backward


def linear_residual_norm_backward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    total: jax.Array,
    dtotal: jax.Array,
    dmean_square: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Returns (dx, dw, dbias, dresidual).

    x: (rows, features), w: (features, outputs), total, dtotal: (rows, outputs), dmean_square: (rows,) float32.
    """
    slope = dmean_square * (2.0 / w.shape[1])
    gradient = dtotal.astype(jnp.float32) + slope[:, None] * total.astype(jnp.float32)
    gradient = gradient.astype(dtotal.dtype)
    dx, dw, dbias, _ = linear_backward(x, w, bias, None, gradient, activation=None)
    return dx, dw, dbias, gradient
