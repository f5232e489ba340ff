"""The gated linear layer on Mosaic GPU: one launch, two accumulators, x read once for both, and its gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Norm
from pallas_kernels.ops._products.product import Config, product, products_by_xla
from pallas_kernels.ops.gated_activation.mosaic_gpu import gated_activation_mosaic
from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.gemm.epilogue import Epilogue

Biases = tuple[jax.Array | None, jax.Array | None]


def gated_linear_forward(
    x: jax.Array,
    norm: Norm | None,
    w_gate: jax.Array,
    w_up: jax.Array,
    biases: Biases = (None, None),
    *,
    activation: Activation,
    config: Config,
    **options: Any,
) -> jax.Array:
    """Returns activation(n @ w_gate + bias_gate) * (n @ w_up + bias_up), n being x's normalised rows.

    x: (rows, features), w_gate, w_up: (features, outputs), all of one 16-bit dtype; so is the result. biases:
    (outputs,) of gate and up, each None for none. options: further ones of `product`.
    """
    if any(each is not None for each in biases):
        options["bias"] = [jnp.zeros(w_gate.shape[1], x.dtype) if each is None else each for each in biases]
    epilogue = Epilogue(activation=activation, gated=True)
    options |= {"name": "gated_linear", "epilogue": epilogue}
    return product(x, [w_gate, w_up], norm=norm, config=config, **options)[0]


def gated_linear_apart(
    activation: Activation, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, biases: Biases = (None, None)
) -> jax.Array:
    """Computes the same by XLA's products, whose results are kept, and a kernel for the gating; differentiable.

    From 512 rows on, one launch that also writes the products takes 4 to 5 % longer: tensor cores wait for results.
    """
    return gating(activation, *products_by_xla(x, (w_gate, w_up), tuple(biases)))  # pyright: ignore[reportCallIssue]


def gating(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes activation(gate) * up of (rows, outputs), as one long row; differentiable."""
    y: jax.Array = gated_activation_mosaic(activation, gate.reshape(1, -1), up.reshape(1, -1))  # pyright: ignore
    return y.reshape(gate.shape)
