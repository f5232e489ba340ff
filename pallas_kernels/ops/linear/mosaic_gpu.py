"""The linear layer on Mosaic GPU: one launch, with everything after the product in registers, and its gradient."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.norm import scaled_rows
from pallas_kernels.ops._products.product import Config, product
from pallas_kernels.ops.linear.config import tuned_config, tuned_key
from pallas_kernels.ops.linear.mosaic_gpu_vjp import linear_backward
from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.few_rows.norm import RowNorm
from pallas_kernels.primitives.gemm.epilogue import Epilogue


def linear_forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    out_dtype: jnp.dtype,
    row_scale: jax.Array | None = None,
    norm: RowNorm | None = None,
    keeps_product: bool = False,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (activation(x @ w + bias) + residual, x @ w); the second is in x's dtype, or None unless it is kept.

    A row_scale multiplies the rows of the product first.

    x: (rows, features), w: (features, outputs), of one 16-bit dtype. bias: (outputs,). residual: (rows, outputs) of
    out_dtype. row_scale: (rows,) float32. norm: of x's rows, in the same launch, with a configuration of few rows.
    """
    if config is None:
        known = tuned_key(x, w, bias, activation and activation.name, residual, jnp.dtype(out_dtype))
        config = tuned_config(known, x.shape[0], keeps_product=keeps_product)
    epilogue = Epilogue(activation=activation, keeps_products=keeps_product)
    rows = {"row_scale": row_scale, "norm": norm}
    options = {"bias": bias, "residual": residual, "out_dtype": out_dtype, **rows}
    results = product(x, [w], config=config, name="linear", epilogue=epilogue, **options)
    return results[0], results[1] if keeps_product else None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def linear_mosaic(
    activation: Activation | None,
    out_dtype: jnp.dtype,
    x: jax.Array,
    row_scale: jax.Array | None,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
) -> jax.Array:
    """Returns activation((row_scale * x) @ w + bias) + residual; differentiable. Arguments as for `linear_forward`."""
    return linear_forward(x, w, bias, residual, activation=activation, row_scale=row_scale, out_dtype=out_dtype)[0]


def _forward(activation, out_dtype, x, row_scale, w, bias, residual):
    keeps = activation is not None and out_dtype == x.dtype
    options = {"activation": activation, "row_scale": row_scale, "out_dtype": out_dtype}
    y, kept = linear_forward(x, w, bias, residual, **options, keeps_product=keeps)
    return y, (x, row_scale, w, bias, kept, residual is not None)


def _backward(activation, out_dtype, saved, dy):
    x, row_scale, w, bias, kept, has_residual = saved
    if out_dtype == x.dtype:
        gradients = linear_backward(x, w, bias, kept, dy, activation=activation, row_scale=row_scale)
    else:  # the tensor cores would round a float32 cotangent

        def forward(x, w, bias, row_scale):
            name = activation and activation.name
            return linear_reference(scaled_rows(x, row_scale), w, bias=bias, activation=name, out_dtype=out_dtype)

        gradients = jax.vjp(forward, x, w, bias, row_scale)[1](dy)
    dx, dw, dbias, drow_scale = gradients
    return dx, drow_scale, dw, dbias, dy if has_residual else None


linear_mosaic.defvjp(_forward, _backward)
