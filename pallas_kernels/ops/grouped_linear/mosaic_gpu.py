"""Grouped linear layers on Mosaic GPU: one launch for all groups, and their gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.ops.grouped_linear.reference import group_of_rows
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.gemm.config import FEW_ROWS, GemmConfig, choose_config
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.grouped import grouped_product
from pallas_kernels.primitives.gemm.grouped_gradient import grouped_weight_gradient


def default_config(rows: int, groups: int, outputs: int, *, products: int = 1) -> GemmConfig:
    """Returns the tiling for so many rows in all. products: of each tile, with an accumulator each.

    Four tiles along the rows, of a group or two, before the next along the outputs: 65536 rows of 128 groups, 2048 to
    768, take 320 µs on an H200, with eight 344.
    """
    if rows <= FEW_ROWS * groups // 2:  # reading the weights takes all the time
        return replace(choose_config(FEW_ROWS, outputs, accumulators=products), group=1)
    return GemmConfig(group=4)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def grouped_linear_mosaic(
    activation: Activation | None,
    transpose: bool,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    group_sizes: jax.Array,
) -> jax.Array:
    """Returns activation(x @ w of each row's group + bias), differentiable. x: (rows, features)."""
    return _forward(activation, transpose, x, w, bias, group_sizes)[0]


def _forward(activation, transpose, x, w, bias, group_sizes, *, keeps_product=False):
    return grouped_product(
        [x],
        [w],
        group_sizes,
        transpose=transpose,
        epilogue=Epilogue(activation=activation, keeps_products=keeps_product),
        biases=[] if bias is None else [bias],
        config=default_config(x.shape[0], w.shape[0], w.shape[1 if transpose else 2]),
        name="grouped_linear",
    )


def _mosaic_fwd(activation, transpose, x, w, bias, group_sizes):
    keeps = activation is not None
    y, *products = _forward(activation, transpose, x, w, bias, group_sizes, keeps_product=keeps)
    return y, (x, w, bias, group_sizes, *products)


def grouped_linear_backward(activation, transpose, saved, dy):
    """Returns the gradients of x, w, the bias and the sizes (None)."""
    x, w, bias, group_sizes, *products = saved
    group = group_of_rows(group_sizes, x.shape[0])
    if products:
        wide = products[0].astype(jnp.float32)
        wide = wide if bias is None else wide + bias.astype(jnp.float32)[group]
        dy = jax.vjp(activation.reference, wide)[1](dy.astype(jnp.float32))[0].astype(x.dtype)
    dx, dw = grouped_gradients(x, w, dy, group_sizes, transpose=transpose)
    return dx, dw, bias_gradient(bias, dy, group), None


def bias_gradient(bias: jax.Array | None, dy: jax.Array, group: jax.Array) -> jax.Array | None:
    """Returns the sum of dy's rows of each group, or None without a bias. group: of each row."""
    if bias is None:
        return None
    own = jnp.where((group < bias.shape[0])[:, None], dy, 0)
    one_hot = jax.nn.one_hot(group, bias.shape[0], dtype=dy.dtype)
    return jnp.dot(one_hot.T, own, preferred_element_type=jnp.float32).astype(bias.dtype)


def grouped_gradients(
    x: jax.Array, w: jax.Array, dy: jax.Array, group_sizes: jax.Array, *, transpose: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of x and w, whose product has the cotangent dy, of x's dtype."""
    config = default_config(x.shape[0], w.shape[0], x.shape[1])
    (dx,) = grouped_product(
        [dy], [w], group_sizes, transpose=not transpose, config=config, name="grouped_linear_gradient"
    )
    left, right = (dy, x) if transpose else (x, dy)
    dw = grouped_weight_gradient(left, right, group_sizes, dtype=w.dtype, name="grouped_linear_weight_gradient")
    return dx, dw


grouped_linear_mosaic.defvjp(_mosaic_fwd, grouped_linear_backward)
