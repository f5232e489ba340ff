"""Dropout, residual sum and norm forward on Mosaic GPU: one launch."""

from __future__ import annotations

import jax

from pallas_kernels.ops._norms.config import ForwardConfig
from pallas_kernels.ops._norms.forward import norm_forward
from pallas_kernels.ops._norms.norm import Norm


def dropout_residual_norm_forward(
    norm: Norm,
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array,
    words: jax.Array,
    *,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (y, residual + dropout(x)).

    x and residual: (rows, features) of one floating dtype, features >= 128. scale, bias: (features,), or None.
    words: (2,) uint32, the key.
    """
    y, total = norm_forward(norm, x, scale=scale, bias=bias, residual=residual, words=words, config=config)
    assert total is not None
    return y, total
