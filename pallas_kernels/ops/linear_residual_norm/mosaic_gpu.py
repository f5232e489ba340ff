"""The layer forward on Mosaic GPU: one launch, and a small one that adds the row statistics.

Each warpgroup ends with some of a row's columns in registers, and writes the sum of their squares: 4 bytes for 512.
XLA adds these parts, one per tile, in a fixed order, and fuses the addition with its consumers.
"""

from __future__ import annotations

import functools
import operator

import jax

from pallas_kernels.ops.linear_residual_norm.config import Config, default_config
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.kernel import few_rows_product
from pallas_kernels.primitives.gemm.kernel import gemm


def linear_residual_norm_forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array,
    *,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns x @ w + bias + residual and the mean of its squares over each row, (rows,) float32.

    x: (rows, features), w: (features, outputs), residual: (rows, outputs), of one 16-bit dtype. bias: (outputs,).
    """
    config = config or default_config(x.shape[0], w.shape[1], x.shape[1])
    arguments = {"bias": bias, "residual": residual, "row_squares": True, "name": "linear_residual_norm"}
    if isinstance(config, FewRowsConfig):
        total, lines = few_rows_product(x, [w], config=config, **arguments)
        squares = functools.reduce(operator.add, list(lines))
    else:
        total, squares = gemm([x], [w], config=config, **arguments)
    return total, squares * (1.0 / w.shape[1])
