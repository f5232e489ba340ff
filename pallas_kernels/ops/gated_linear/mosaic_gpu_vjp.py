"""The gated linear layer backward: a pass on Mosaic GPU for the gating, then the products.

The forward pass has saved both products in x's dtype. The row kernel of `gated_activation` computes their cotangents in
one pass. The weights' gradients are XLA's products, and x's is one launch for both of its products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.product import product_gradients
from pallas_kernels.ops.gated_activation.mosaic_gpu import gated_activation_backward
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.platform import varying_like


def gated_linear_backward(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    dy: jax.Array,
    biases: tuple[jax.Array | None, jax.Array | None] = (None, None),
    *,
    activation: Activation,
    row_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, tuple[jax.Array | None, ...]]:
    """Returns (dx, dw_gate, dw_up, drow_scale, dbiases), those of absent arguments None.

    x: (rows, features), w_gate, w_up: (features, outputs), gate, up (the products with their biases) and dy: (rows,
    outputs), all of one dtype; biases: (outputs,) of gate and up, or None; row_scale: (rows,) float32 or None.
    """
    dgate, dup = gated_activation_backward(
        gate.reshape(1, -1), up.reshape(1, -1), dy.reshape(1, -1), activation=activation
    )
    assert dup is not None
    cotangents = dgate.reshape(dy.shape), dup.reshape(dy.shape)
    dx, (dw_gate, dw_up), drow_scale = product_gradients(x, (w_gate, w_up), cotangents, row_scale)
    dbiases = tuple(
        None if bias is None else varying_like(jnp.sum(d, axis=0, dtype=jnp.float32).astype(bias.dtype), dy)
        for bias, d in zip(biases, cotangents, strict=True)
    )
    return dx, dw_gate, dw_up, drow_scale, dbiases
