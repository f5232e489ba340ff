"""The gated linear layer backward: a pass on Mosaic GPU for the gating, then the products.

The forward pass has saved both products in x's dtype. The row kernel of `gated_activation` computes their cotangents in
one pass. The weights' gradients are XLA's products, and x's is one launch for both of its products.
"""

from __future__ import annotations

import jax

from pallas_kernels.ops._products.product import product_gradients
from pallas_kernels.ops.gated_activation.mosaic_gpu import gated_activation_backward
from pallas_kernels.primitives.activations import Activation


def gated_linear_backward(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    dy: jax.Array,
    *,
    activation: Activation,
    row_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns (dx, dw_gate, dw_up, drow_scale), the last None without a row_scale.

    x: (rows, features), w_gate, w_up: (features, outputs), gate, up (the products) and dy: (rows, outputs), all of one
    dtype; row_scale: (rows,) float32 or None.
    """
    dgate, dup = gated_activation_backward(
        gate.reshape(1, -1), up.reshape(1, -1), dy.reshape(1, -1), activation=activation
    )
    assert dup is not None
    cotangents = dgate.reshape(dy.shape), dup.reshape(dy.shape)
    dx, (dw_gate, dw_up), drow_scale = product_gradients(x, (w_gate, w_up), cotangents, row_scale)
    return dx, dw_gate, dw_up, drow_scale
