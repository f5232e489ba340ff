"""The linear layer with integer weights on Mosaic GPU: one launch, weights read once and widened in registers."""

from __future__ import annotations

import jax

from pallas_kernels.ops._products.layer import Layer, LayerArrays
from pallas_kernels.ops.quantized_linear.config import default_config
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.kernel import few_rows_product
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.integer_gemm.kernel import integer_gemm


def quantized_linear_forward(layer: Layer, arrays: LayerArrays) -> jax.Array:
    """Returns activation(x @ w + bias) + residual, (rows, outputs).

    x: (rows, features), bfloat16 or float16, few rows if scales are for groups.
    """
    x, w, bias, residual = arrays
    config = default_config(x.shape[0], w.shape[1], w.shape[0], w.values.dtype)
    arguments = {
        "epilogue": Epilogue(activation=layer.activation),
        "bias": bias,
        "residual": residual,
        "out_dtype": layer.out_dtype,
        "name": "quantized_linear",
    }
    if isinstance(config, FewRowsConfig):
        return few_rows_product(x, [w.values], scales=[w.scales], config=config, **arguments)[0]
    return integer_gemm(x, w.values, w.scales[0], config=config, **arguments)
