"""The linear layers on Mosaic GPU: one launch, with everything after the product in registers, and their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.layer import Layer, LayerArrays
from pallas_kernels.ops._products.product import Config, bias_gradient, default_config, product, product_gradients
from pallas_kernels.ops.bias_activation.mosaic_gpu import bias_activation_backward
from pallas_kernels.ops.linear.config import tuned_config, tuned_key
from pallas_kernels.ops.linear.reference import layer_reference
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.platform import varying_like


def linear_forward(
    layer: Layer,
    arrays: LayerArrays,
    *,
    keeps_product: bool = False,
    config: Config | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns activation(x @ w + bias) + residual, and x @ w in x's dtype if it is kept, else None.

    x: (rows, features), w: (features, outputs), of one 16-bit dtype. options: further ones of `product`.
    """
    x, w, bias, residual = arrays
    config = config or tuned_config(tuned_key(layer, arrays), x.shape[0], keeps_product=keeps_product)
    results = product(
        x,
        [w],
        config=config,
        name="linear",
        epilogue=Epilogue(activation=layer.activation, keeps_products=keeps_product),
        bias=bias,
        residual=residual,
        out_dtype=layer.out_dtype,
        **options,
    )
    return results[0], results[1] if keeps_product else None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear_mosaic(layer: Layer, arrays: LayerArrays) -> jax.Array:
    """Returns activation(x @ w + bias) + residual; differentiable. Arguments as for `linear_forward`."""
    return linear_forward(layer, arrays)[0]


def _forward(layer, arrays):
    keeps = layer.activation is not None and layer.out_dtype == arrays.x.dtype
    y, kept = linear_forward(layer, arrays, keeps_product=keeps)
    # Saved values are arrays, or a structure without any: of the residual only whether there is one.
    return y, (arrays._replace(residual=None if arrays.residual is None else ()), kept)


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


def _backward(layer, saved, dy):
    (x, w, bias, residual), kept = saved
    gradients: tuple[Any, ...]
    if layer.out_dtype == x.dtype:
        gradients = linear_backward(x, w, bias, kept, dy, activation=layer.activation)
    else:  # the tensor cores would round a float32 cotangent
        gradients = jax.vjp(lambda *own: layer_reference(layer, LayerArrays(*own)), x, w, bias)[1](dy)
    return (LayerArrays(*gradients, residual=None if residual is None else dy),)


linear_mosaic.defvjp(_forward, _backward)


def linear_residual_norm_forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array,
    *,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns x @ w + bias + residual and the mean of its squares over each row, (rows,) float32.

    Each warpgroup ends with some of a row's columns in registers, and writes the sum of their squares: 4 bytes for 512.
    XLA adds these parts, one per tile. Of few rows XLA squares the result, which the L2 cache has.

    x: (rows, features), w: (features, outputs), residual: (rows, outputs), of one 16-bit dtype. bias: (outputs,).
    """
    (rows, features), outputs = x.shape, w.shape[1]
    config = config or default_config(rows, outputs, features)
    options = {"bias": bias, "residual": residual, "config": config, "name": "linear_residual_norm"}
    if isinstance(config, FewRowsConfig):
        (total,) = product(x, [w], **options)
        return total, jnp.mean(jnp.square(total.astype(jnp.float32)), axis=1)
    total, squares = product(x, [w], **options, row_squares=True)
    return total, squares * (1.0 / outputs)


@jax.custom_vjp
def linear_residual_norm_mosaic(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, residual: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns what `linear_residual_norm_forward` does; differentiable."""
    return linear_residual_norm_forward(x, w, bias, residual)


def _residual_norm_forward(x, w, bias, residual):
    total, mean_square = linear_residual_norm_forward(x, w, bias, residual)
    return (total, mean_square), (x, w, bias, total)


def _residual_norm_backward(saved, cotangents):
    """The statistics' gradient joins that of the sum, then come the linear layer's products."""
    x, w, bias, total = saved
    dtotal, dmean_square = cotangents
    slope = dmean_square * (2.0 / w.shape[1])
    gradient = dtotal.astype(jnp.float32) + slope[:, None] * total.astype(jnp.float32)
    gradient = gradient.astype(dtotal.dtype)
    dx, dw, dbias = linear_backward(x, w, bias, None, gradient, activation=None)
    return dx, dw, dbias, gradient


linear_residual_norm_mosaic.defvjp(_residual_norm_forward, _residual_norm_backward)
