"""Grouped gated linear layers on Mosaic GPU: one launch for all groups, and their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.gated_activation.mosaic_gpu import gated_activation_backward, gated_activation_forward
from pallas_kernels.ops.grouped_linear.mosaic_gpu import bias_gradient, default_config
from pallas_kernels.ops.grouped_linear.reference import group_of_rows
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.grouped import grouped_product
from pallas_kernels.primitives.gemm.grouped_gradient import grouped_weight_gradient

Biases = tuple[jax.Array | None, jax.Array | None]
"""(groups, outputs) of gate and up, or None."""


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


def _mosaic_fwd(activation, x, w_gate, w_up, biases, group_sizes):
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
    options = {
        "config": default_config(x.shape[0], w_gate.shape[0], x.shape[1]),
        "name": "grouped_gated_linear_gradient",
    }
    (dx,) = grouped_product(cotangents, [w_gate, w_up], group_sizes, transpose=True, **options)
    options = {"dtype": jnp.dtype(w_gate.dtype), "name": "grouped_gated_linear_weight_gradient"}
    dw_gate, dw_up = (grouped_weight_gradient(x, each, group_sizes, **options) for each in cotangents)
    group = group_of_rows(group_sizes, x.shape[0])
    dbias_gate, dbias_up = (bias_gradient(bias, each, group) for bias, each in zip(biases, cotangents, strict=True))
    return dx, dw_gate, dw_up, (dbias_gate, dbias_up), None


grouped_gated_linear_mosaic.defvjp(_mosaic_fwd, grouped_gated_linear_backward)
