"""The linear layer with integer weights on Mosaic GPU: one launch, weights read once and widened in registers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.quantized_linear.config import default_config
from pallas_kernels.ops.quantized_linear.weight import QuantizedWeight
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.kernel import few_rows_product
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.integer_gemm.kernel import integer_gemm


def quantized_linear_forward(
    x: jax.Array,
    w: QuantizedWeight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """Returns activation(x @ w + bias) + residual, (rows, outputs) of out_dtype.

    x: (rows, features), bfloat16 or float16, few rows if scales are for groups. bias: (outputs,). residual: (rows,
    outputs) of out_dtype.
    """
    config = default_config(x.shape[0], w.shape[1], w.shape[0], w.values.dtype)
    arguments = {
        "epilogue": Epilogue(activation=activation),
        "bias": bias,
        "residual": residual,
        "out_dtype": out_dtype,
        "name": "quantized_linear",
    }
    if isinstance(config, FewRowsConfig):
        return few_rows_product(x, [w.values], scales=[w.scales], config=config, **arguments)[0]
    return integer_gemm(x, w.values, w.scales[0], config=config, **arguments)
