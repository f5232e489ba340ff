"""Dropout, residual sum and norm backward on Mosaic GPU: the mask is drawn again, not read."""

from __future__ import annotations

import jax

from pallas_kernels.ops._norms.backward import NormGradients, norm_backward
from pallas_kernels.ops._norms.config import BackwardConfig
from pallas_kernels.ops._norms.norm import Norm


def dropout_residual_norm_backward(
    norm: Norm,
    total: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    words: jax.Array,
    dy: jax.Array,
    dtotal: jax.Array | None,
    *,
    config: BackwardConfig | None = None,
) -> NormGradients:
    """The gradients of x (`dx`), of the residual (`dtotal`), of the scale and of the bias.

    total (residual + dropout(x)), dy and dtotal: (rows, features) of one floating dtype, features >= 128.
    scale, bias: (features,), or None; of the bias only the dtype counts. words: (2,) uint32, the key.
    """
    return norm_backward(norm, total, dy, scale=scale, bias=bias, dtotal=dtotal, words=words, config=config)
