"""The gated linear layer forward on Mosaic GPU: one launch, two accumulators, x read once for both."""

from __future__ import annotations

import jax

from pallas_kernels.ops.gated_linear.config import default_forward
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.kernel import gemm

SIDE_BY_SIDE = ((0, 0, 0), (0, 1, 1))
"""One left operand with each of two right ones, an accumulator each."""


def gated_linear_forward(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    activation: Activation,
    keeps_products: bool = False,
    config: GemmConfig | None = None,
) -> tuple[jax.Array, ...]:
    """Returns (activation(x @ w_gate) * (x @ w_up),) and, where asked for, x @ w_gate and x @ w_up behind it.

    x: (rows, features), w_gate, w_up: (features, outputs), all of one 16-bit dtype; so are the results.
    """
    return gemm(
        [x],
        [w_gate, w_up],
        products=SIDE_BY_SIDE,
        epilogue=Epilogue(activation=activation, gated=True, keeps_products=keeps_products),
        config=config or default_forward(x.shape[0], w_gate.shape[1], w_gate.shape[0], keeps_products=keeps_products),
        name="gated_linear",
    )
