"""RMSNorm forward on Mosaic GPU."""

from __future__ import annotations

import jax

from pallas_kernels.ops._norms.config import ForwardConfig
from pallas_kernels.ops._norms.forward import norm_forward
from pallas_kernels.ops._norms.norm import Norm


def rms_norm_forward(
    x: jax.Array,
    scale: jax.Array,
    residual: jax.Array | None,
    *,
    epsilon: float,
    config: ForwardConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (y, x + residual), or (y, None) without a residual.

    x and residual: (rows, features) of one floating dtype, features >= 128. scale: (features,).
    """
    return norm_forward(Norm(name="rms_norm", epsilon=epsilon), x, scale=scale, residual=residual, config=config)
