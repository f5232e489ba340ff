"""The linear layer forward on Mosaic GPU: one launch, everything behind the product done on the accumulator."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.linear.config import default_config
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.kernel import gemm


def linear_forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    out_dtype: jnp.dtype,
    keeps_product: bool = False,
    config: GemmConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (activation(x @ w + bias) + residual, x @ w), the second only where asked for, in x's dtype.

    x: (rows, features), w: (features, outputs), of one 16-bit dtype. bias: (outputs,). residual: (rows, outputs) of
    out_dtype.
    """
    results = gemm(
        [x],
        [w],
        epilogue=Epilogue(activation=activation, keeps_products=keeps_product),
        bias=bias,
        residual=residual,
        out_dtype=out_dtype,
        config=config or default_config(x.shape[0], w.shape[1], w.shape[0], keeps_product=keeps_product),
        name="linear",
    )
    return results[0], results[1] if keeps_product else None
