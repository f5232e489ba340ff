"""The linear layer forward on Mosaic GPU: one launch, with everything after the product in registers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.linear.config import Config, problem, tuned_config
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.kernel import few_rows_product
from pallas_kernels.primitives.few_rows.norm import RowNorm
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.kernel import gemm


def linear_forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    row_scale: jax.Array | None = None,
    norm: RowNorm | None = None,
    out_dtype: jnp.dtype,
    keeps_product: bool = False,
    config: Config | None = None,
    name: str = "linear",
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (activation(x @ w + bias) + residual, x @ w); the second is in x's dtype, or None unless it is kept.

    A row_scale multiplies the rows of the product first.

    x: (rows, features), w: (features, outputs), of one 16-bit dtype. bias: (outputs,). residual: (rows, outputs) of
    out_dtype. row_scale: (rows,) float32. norm: of x's rows, in the same launch, with a configuration of few rows.
    """
    if config is None:
        known = problem(x, w, bias, None if activation is None else activation.name, residual, jnp.dtype(out_dtype))
        config = tuned_config(known, x.shape[0], keeps_product=keeps_product)
    arguments = {
        "epilogue": Epilogue(activation=activation, keeps_products=keeps_product),
        "bias": bias,
        "row_scale": row_scale,
        "residual": residual,
        "out_dtype": out_dtype,
        "name": name,
    }
    if isinstance(config, FewRowsConfig):
        results = few_rows_product(x, [w], norm=norm, config=config, **arguments)
    elif norm is not None:
        raise ValueError("linear_forward: only a product of few rows has a norm in it.")
    else:
        results = gemm([x], [w], config=config, **arguments)
    return results[0], results[1] if keeps_product else None
