"""Grouped linear layers, plain and gated, on Mosaic GPU: one launch for all groups, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.gated_activation.mosaic_gpu import gated_activation_backward, gated_activation_forward
from pallas_kernels.ops.grouped_linear.reference import group_of_rows
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.gemm.config import FEW_ROWS, GemmConfig, choose_config
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.grouped import grouped_product
from pallas_kernels.primitives.gemm.grouped_gradient import grouped_weight_gradient

Biases = tuple[jax.Array | None, jax.Array | None]
"""(groups, outputs) of gate and up, or None."""


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
    if products:
        wide = products[0].astype(jnp.float32)
        group = group_of_rows(group_sizes, x.shape[0])
        wide = wide if bias is None else wide + bias.astype(jnp.float32)[group]
        dy = jax.vjp(activation.reference, wide)[1](dy.astype(jnp.float32))[0].astype(x.dtype)
    dx, (dw,), (dbias,) = _gradients("grouped_linear", x, [w], [bias], [dy], group_sizes, transpose=transpose)
    return dx, dw, dbias, None


grouped_linear_mosaic.defvjp(_mosaic_fwd, grouped_linear_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_gated_linear_mosaic(
    activation: Activation, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, biases: Biases, group_sizes: jax.Array
) -> jax.Array:
    """Returns activation(x @ w_gate + bias_gate) * (x @ w_up + bias_up) by each row's group. x: (rows, features)."""
    (y,) = _products(x, w_gate, w_up, biases, group_sizes, Epilogue(activation=activation, gated=True))
    return y


def _products(x, w_gate, w_up, biases, group_sizes, epilogue):
    if any(each is not None for each in biases):
        zeros = jnp.zeros((w_gate.shape[0], w_gate.shape[2]), x.dtype)
        biases = [zeros if each is None else each for each in biases]
    else:
        biases = ()
    config = default_config(x.shape[0], w_gate.shape[0], w_gate.shape[2], products=2)
    options = {"epilogue": epilogue, "biases": biases, "config": config, "name": "grouped_gated_linear"}
    return grouped_product([x], [w_gate, w_up], group_sizes, **options)


def _gated_fwd(activation, x, w_gate, w_up, biases, group_sizes):
    # Both products and their gating in a launch of its own: a kernel that stores three results keeps the tensor cores
    # waiting.
    gate, up = _products(x, w_gate, w_up, biases, group_sizes, Epilogue())
    y = gated_activation_forward(gate.reshape(1, -1), up.reshape(1, -1), activation=activation)
    return y.reshape(gate.shape), (x, w_gate, w_up, biases, group_sizes, gate, up)


def grouped_gated_linear_backward(
    activation: Activation, saved: tuple[Any, ...], dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, Biases, None]:
    """Returns the gradients of x, both weights, both biases and the sizes (None)."""
    x, w_gate, w_up, biases, group_sizes, gate, up = saved
    flat = (each.reshape(1, -1) for each in (gate, up, dy))
    dgate, dup = gated_activation_backward(*flat, activation=activation)
    assert dup is not None
    cotangents = [dgate.reshape(dy.shape), dup.reshape(dy.shape)]
    dx, (dw_gate, dw_up), (dbias_gate, dbias_up) = _gradients(
        "grouped_gated_linear", x, [w_gate, w_up], biases, cotangents, group_sizes
    )
    return dx, dw_gate, dw_up, (dbias_gate, dbias_up), None


grouped_gated_linear_mosaic.defvjp(_gated_fwd, grouped_gated_linear_backward)


def _gradients(
    name: str,
    x: jax.Array,
    weights: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    cotangents: Sequence[jax.Array],
    group_sizes: jax.Array,
    *,
    transpose: bool = False,
) -> tuple[jax.Array, list[jax.Array], list[jax.Array | None]]:
    """Returns the gradients of x, weights and biases, whose products have the cotangents, of x's dtype."""
    config = default_config(x.shape[0], weights[0].shape[0], x.shape[1])
    (dx,) = grouped_product(
        cotangents, weights, group_sizes, transpose=not transpose, config=config, name=f"{name}_gradient"
    )
    options = {"dtype": jnp.dtype(weights[0].dtype), "name": f"{name}_weight_gradient"}
    pairs = [(dy, x) if transpose else (x, dy) for dy in cotangents]
    dweights = [grouped_weight_gradient(*pair, group_sizes, **options) for pair in pairs]
    group = group_of_rows(group_sizes, x.shape[0])
    return dx, dweights, [_bias_gradient(*each, group) for each in zip(biases, cotangents, strict=True)]


def _bias_gradient(bias: jax.Array | None, dy: jax.Array, group: jax.Array) -> jax.Array | None:
    """Returns the sum of dy's rows of each group, or None without a bias. group: of each row."""
    if bias is None:
        return None
    own = jnp.where((group < bias.shape[0])[:, None], dy, 0)
    one_hot = jax.nn.one_hot(group, bias.shape[0], dtype=dy.dtype)
    return jnp.dot(one_hot.T, own, preferred_element_type=jnp.float32).astype(bias.dtype)
