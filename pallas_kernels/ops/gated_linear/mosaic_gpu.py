"""The gated linear layer on Mosaic GPU: one launch, two accumulators, x read once for both, and its gradient."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.ops._products.norm import scaled_rows
from pallas_kernels.ops._products.product import Config, product
from pallas_kernels.ops.gated_activation.mosaic_gpu import gated_activation_forward
from pallas_kernels.ops.gated_linear.config import tuned_config, tuned_key
from pallas_kernels.ops.gated_linear.mosaic_gpu_vjp import gated_linear_backward
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.few_rows.norm import RowNorm
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gradients import products_apart

Biases = tuple[jax.Array | None, jax.Array | None]


def gated_linear_forward(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    biases: Biases = (None, None),
    *,
    activation: Activation,
    row_scale: jax.Array | None = None,
    norm: RowNorm | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Returns activation(x @ w_gate + bias_gate) * (x @ w_up + bias_up).

    x: (rows, features), w_gate, w_up: (features, outputs), all of one 16-bit dtype; so is the result. biases:
    (outputs,) of gate and up, each None for none.
    row_scale: (rows,) float32, multiplies the products' rows first. norm: of x's rows, in the same launch, with a
    configuration of few rows.
    """
    config = config or tuned_config(tuned_key(x, w_gate, activation.name), x.shape[0])
    options = {"epilogue": Epilogue(activation=activation, gated=True), "row_scale": row_scale, "norm": norm}
    if any(each is not None for each in biases):
        options["bias"] = [jnp.zeros(w_gate.shape[1], x.dtype) if each is None else each for each in biases]
    return product(x, [w_gate, w_up], config=config, name="gated_linear", **options)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_linear_mosaic(
    activation: Activation,
    x: jax.Array,
    row_scale: jax.Array | None,
    w_gate: jax.Array,
    w_up: jax.Array,
    biases: Biases = (None, None),
) -> jax.Array:
    """Computes the gated linear layer, differentiable; arguments as for `gated_linear_forward`."""
    return gated_linear_forward(x, w_gate, w_up, biases, activation=activation, row_scale=row_scale)


def _forward(activation, x, row_scale, w_gate, w_up, biases):
    # From 512 rows on, one launch that also writes the products takes 4 to 5 % longer: tensor cores wait for results.
    products = products_apart(scaled_rows(x, row_scale), (w_gate, w_up))
    # XLA's product adds a bias of its own dtype without a pass over the result.
    gate, up = (y if b is None else y + b.astype(y.dtype) for y, b in zip(products, biases, strict=True))
    y = gated_activation_forward(gate.reshape(1, -1), up.reshape(1, -1), activation=activation).reshape(gate.shape)
    return y, (x, row_scale, w_gate, w_up, gate, up, biases)


def _backward(activation, saved, dy):
    x, row_scale, w_gate, w_up, gate, up, biases = saved
    options = {"activation": activation, "row_scale": row_scale}
    gradients = gated_linear_backward(x, w_gate, w_up, gate, up, dy, biases, **options)
    dx, dw_gate, dw_up, drow_scale, dbiases = gradients
    return dx, drow_scale, dw_gate, dw_up, dbiases


gated_linear_mosaic.defvjp(_forward, _backward)
