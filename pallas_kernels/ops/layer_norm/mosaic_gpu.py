"""LayerNorm forward on Mosaic GPU."""

from __future__ import annotations

import jax

from pallas_kernels.ops._norms.config import ForwardConfig
from pallas_kernels.ops._norms.forward import norm_forward
from pallas_kernels.ops._norms.norm import Norm


def layer_norm_forward(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    epsilon: float,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y, x + residual), or (y, None) without a residual.

    x and residual: (rows, features) of one floating dtype, features >= 128. scale, bias: (features,), or None.
    """
    norm = Norm(name="layer_norm", epsilon=epsilon)
    return norm_forward(norm, x, scale=scale, bias=bias, residual=residual, config=config)
