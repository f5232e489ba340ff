"""The gated linear layer forward on Mosaic GPU: one launch, two accumulators, x read once for both."""

from __future__ import annotations

import jax

from pallas_kernels.ops.gated_linear.config import Config, problem, tuned_config
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.kernel import few_rows_product
from pallas_kernels.primitives.few_rows.norm import RowNorm
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.kernel import gemm

SIDE_BY_SIDE = ((0, 0, 0), (0, 1, 1))
"""One left operand times each of two right operands, with an accumulator each."""


def gated_linear_forward(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    activation: Activation,
    row_scale: jax.Array | None = None,
    norm: RowNorm | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Returns activation(x @ w_gate) * (x @ w_up).

    x: (rows, features), w_gate, w_up: (features, outputs), all of one 16-bit dtype; so is the result.
    row_scale: (rows,) float32, multiplies the products' rows first. norm: of x's rows, in the same launch, with a
    configuration of few rows.
    """
    if config is None:
        config = tuned_config(problem(x, w_gate, activation.name), x.shape[0])
    epilogue = Epilogue(activation=activation, gated=True)
    arguments = {"epilogue": epilogue, "row_scale": row_scale, "name": "gated_linear"}
    if isinstance(config, FewRowsConfig):
        return few_rows_product(x, [w_gate, w_up], norm=norm, config=config, **arguments)[0]
    if norm is not None:
        raise ValueError("gated_linear_forward: only a product of few rows has a norm in it.")
    return gemm([x], [w_gate, w_up], products=SIDE_BY_SIDE, config=config, **arguments)[0]
