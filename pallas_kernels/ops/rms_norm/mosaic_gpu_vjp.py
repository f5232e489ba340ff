"""RMSNorm backward on Mosaic GPU."""

from __future__ import annotations

import jax

from pallas_kernels.ops._norms.backward import norm_backward
from pallas_kernels.ops._norms.config import BackwardConfig
from pallas_kernels.ops._norms.norm import Norm


def rms_norm_backward(
    total: jax.Array,
    scale: jax.Array,
    dy: jax.Array,
    dtotal: jax.Array | None,
    *,
    epsilon: float,
    config: BackwardConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (dtotal + the gradient through the norm, dscale).

    total (the normalised x, or x + residual), dy and dtotal: (rows, features) of one floating dtype, features >= 128.
    scale: (features,).
    """
    norm = Norm(name="rms_norm", epsilon=epsilon)
    gradients = norm_backward(norm, total, dy, scale=scale, dtotal=dtotal, config=config)
    assert gradients.dscale is not None
    return gradients.dtotal, gradients.dscale
