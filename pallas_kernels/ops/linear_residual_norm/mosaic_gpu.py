"""The layer forward on Mosaic GPU: one launch, and one over its row statistics' parts.

Each warpgroup has some of a row's columns in registers when they are done, and writes the sum of their squares: 4 bytes
for 512. The parts, one a tile, are added up in a fixed order by XLA, which fuses that with what becomes of the sum.
"""

from __future__ import annotations

import jax

from pallas_kernels.ops.linear_residual_norm.config import default_config
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gemm.kernel import gemm


def linear_residual_norm_forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array,
    *,
    config: GemmConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns x @ w + bias + residual and the mean of its squares over each row, (rows,) float32.

    x: (rows, features), w: (features, outputs), residual: (rows, outputs), of one 16-bit dtype. bias: (outputs,).
    """
    total, squares = gemm(
        [x],
        [w],
        bias=bias,
        residual=residual,
        row_squares=True,
        config=config or default_config(x.shape[0], w.shape[1]),
        name="linear_residual_norm",
    )
    return total, squares * (1.0 / w.shape[1])
