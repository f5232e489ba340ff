"""The layer on Mosaic GPU: one launch, a small one that adds the row statistics, and the gradient.

Each warpgroup ends with some of a row's columns in registers, and writes the sum of their squares: 4 bytes for 512.
XLA adds these parts, one per tile, in a fixed order, and fuses the addition with its consumers. Of few rows XLA squares
the result, which the L2 cache has.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.product import Config, default_config, product
from pallas_kernels.ops.linear.mosaic_gpu import linear_backward
from pallas_kernels.primitives.few_rows.config import FewRowsConfig


def linear_residual_norm_forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array,
    *,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns x @ w + bias + residual and the mean of its squares over each row, (rows,) float32.

    x: (rows, features), w: (features, outputs), residual: (rows, outputs), of one 16-bit dtype. bias: (outputs,).
    """
    (rows, features), outputs = x.shape, w.shape[1]
    config = config or default_config(rows, outputs, features)
    options = {"bias": bias, "residual": residual, "config": config, "name": "linear_residual_norm"}
    if isinstance(config, FewRowsConfig):
        (total,) = product(x, [w], **options)
        return total, jnp.mean(jnp.square(total.astype(jnp.float32)), axis=1)
    total, squares = product(x, [w], **options, row_squares=True)
    return total, squares * (1.0 / outputs)


@jax.custom_vjp
def linear_residual_norm_mosaic(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, residual: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns what `linear_residual_norm_forward` does; differentiable."""
    return linear_residual_norm_forward(x, w, bias, residual)


def _forward(x, w, bias, residual):
    total, mean_square = linear_residual_norm_forward(x, w, bias, residual)
    return (total, mean_square), (x, w, bias, total)


def _backward(saved, cotangents):
    """The statistics' gradient joins that of the sum, then come the linear layer's products."""
    x, w, bias, total = saved
    dtotal, dmean_square = cotangents
    slope = dmean_square * (2.0 / w.shape[1])
    gradient = dtotal.astype(jnp.float32) + slope[:, None] * total.astype(jnp.float32)
    gradient = gradient.astype(dtotal.dtype)
    dx, dw, dbias = linear_backward(x, w, bias, None, gradient, activation=None)
    return dx, dw, dbias, gradient


linear_residual_norm_mosaic.defvjp(_forward, _backward)
