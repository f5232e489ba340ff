"""The linear layer backward: one pass on Mosaic GPU for the activation and bias, if any, then two products.

With an activation the forward pass has saved its product in x's dtype. The row kernel of `bias_activation` computes the
product's cotangent and the bias's gradient in one pass, and both products here read that cotangent. They have no
epilogue, and for such products XLA is faster on an H200: 2376 µs where our main loop takes 2431 (8192 rows of 14336
features, 4096 outputs), 213 and 227 (512 rows, 4096, 16384).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.product import product_gradients
from pallas_kernels.ops.bias_activation.mosaic_gpu_vjp import bias_activation_backward
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.platform import varying_like


def linear_backward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    product: jax.Array | None,
    dy: jax.Array,
    *,
    activation: Activation | None,
    row_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (dx, dw, dbias, drow_scale); dbias and drow_scale are None without their argument.

    x: (rows, features), w: (features, outputs), dy: (rows, outputs), of one dtype. product: x @ w as the forward kernel
    saved it, needed with an activation. row_scale: (rows,), or None.
    """
    dbias = None
    if activation is not None:
        assert product is not None
        dy, dbias = bias_activation_backward(product, bias, None, dy, activation=activation)
    elif bias is not None:
        dbias = jnp.sum(dy, axis=0, dtype=jnp.float32).astype(bias.dtype)
    dx, (dw,), drow_scale = product_gradients(x, [w], [dy], row_scale)
    return dx, dw, None if dbias is None else varying_like(dbias, dy), drow_scale
