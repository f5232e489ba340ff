"""The linear layer on Mosaic GPU: one launch, with everything after the product in registers, and its gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.product import Config, bias_gradient, product, product_gradients
from pallas_kernels.ops.bias_activation.mosaic_gpu_vjp import bias_activation_backward
from pallas_kernels.ops.linear.config import tuned_config, tuned_key
from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.platform import varying_like


def linear_forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    out_dtype: jnp.dtype,
    keeps_product: bool = False,
    config: Config | None = None,
    **before: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (activation(x @ w + bias) + residual, x @ w); the second is in x's dtype, or None unless it is kept.

    x: (rows, features), w: (features, outputs), of one 16-bit dtype. bias: (outputs,). residual: (rows, outputs) of
    out_dtype. before: see `before_product`.
    """
    if config is None:
        known = tuned_key(x, w, bias, activation and activation.name, residual, jnp.dtype(out_dtype))
        config = tuned_config(known, x.shape[0], keeps_product=keeps_product)
    epilogue = Epilogue(activation=activation, keeps_products=keeps_product)
    options = {"bias": bias, "residual": residual, "out_dtype": out_dtype, **before}
    results = product(x, [w], config=config, name="linear", epilogue=epilogue, **options)
    return results[0], results[1] if keeps_product else None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def linear_mosaic(
    activation: Activation | None,
    out_dtype: jnp.dtype,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
) -> jax.Array:
    """Returns activation(x @ w + bias) + residual; differentiable. Arguments as for `linear_forward`."""
    return linear_forward(x, w, bias, residual, activation=activation, out_dtype=out_dtype)[0]


def _forward(activation, out_dtype, x, w, bias, residual):
    keeps = activation is not None and out_dtype == x.dtype
    options = {"activation": activation, "out_dtype": out_dtype, "keeps_product": keeps}
    y, kept = linear_forward(x, w, bias, residual, **options)
    return y, (x, w, bias, kept, residual is not None)


def linear_backward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    kept: jax.Array | None,
    dy: jax.Array,
    *,
    activation: Activation | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns (dx, dw, dbias); dbias is None without a bias.

    x: (rows, features), w: (features, outputs), dy: (rows, outputs), of one dtype. kept: x @ w as the forward kernel
    saved it, needed with an activation. A row kernel computes its cotangent and the bias's gradient in one pass. Both
    products are XLA's, which is faster without an epilogue: 2376 µs on an H200 where our main loop takes 2431 (8192
    rows of 14336 features, 4096 outputs), 213 and 227 (512 rows, 4096, 16384).
    """
    if activation is None:
        dbias = bias_gradient(bias, dy)
    else:
        assert kept is not None
        dy, dbias = bias_activation_backward(kept, bias, None, dy, activation=activation)
        dbias = None if dbias is None else varying_like(dbias, dy)
    dx, (dw,) = product_gradients(x, [w], [dy])
    return dx, dw, dbias


def _backward(activation, out_dtype, saved, dy):
    x, w, bias, kept, has_residual = saved
    if out_dtype == x.dtype:
        gradients = linear_backward(x, w, bias, kept, dy, activation=activation)
    else:  # the tensor cores would round a float32 cotangent

        def forward(x, w, bias):
            name = activation and activation.name
            return linear_reference(x, w, bias=bias, activation=name, out_dtype=out_dtype)

        gradients = jax.vjp(forward, x, w, bias)[1](dy)
    return *gradients, dy if has_residual else None


linear_mosaic.defvjp(_forward, _backward)
