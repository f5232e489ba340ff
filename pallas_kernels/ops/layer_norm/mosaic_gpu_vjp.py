"""LayerNorm backward on Mosaic GPU."""

from __future__ import annotations

import jax

from pallas_kernels.ops._norms.backward import NormGradients, norm_backward
from pallas_kernels.ops._norms.config import BackwardConfig
from pallas_kernels.ops._norms.norm import Norm


def layer_norm_backward(
    total: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    dy: jax.Array,
    dtotal: jax.Array | None,
    *,
    epsilon: float,
    config: BackwardConfig | None = None,
) -> NormGradients:
    """The gradients of x (and of a residual, the same), of the scale and of the bias.

    total (the normalised x, or x + residual), dy and dtotal: (rows, features) of one floating dtype, features >= 128.
    scale, bias: (features,), or None; of the bias only the dtype counts.
    """
    norm = Norm(name="layer_norm", epsilon=epsilon)
    return norm_backward(norm, total, dy, scale=scale, bias=bias, dtotal=dtotal, config=config)
