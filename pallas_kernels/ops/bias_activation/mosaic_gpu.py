"""Bias, activation, dropout and residual sum forward on Mosaic GPU: one pass, 16-byte accesses directly to registers.

A block takes the same columns of a few rows and reads their bias once.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.activations import Activation
from pallas_kernels.primitives.elementwise import Keep, Part, elementwise_kernel


def bias_activation_forward(
    x: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    words: jax.Array | None,
    *,
    activation: Activation,
    rate: float = 0.0,
) -> jax.Array:
    """Returns residual + dropout(activation(x + bias)), like x.

    x, residual: (rows, features) of one floating dtype; one row where there is no bias. bias: (features,).
    words: the dropout key's, (2,) uint32, or None for no dropout at the given rate.
    """
    operands = present({"x": x, "bias": bias, "residual": residual, "words": words})
    dtype = x.dtype

    def step(row: jax.Array, part: Part, loaded: Mapping[str, jax.Array], keep: Keep | None):
        y = activation.value(add_bias(loaded), dtype)
        if keep is not None:
            y = keep(y, row, part)
        return y + loaded["residual"].astype(jnp.float32) if "residual" in loaded else y

    return elementwise_kernel("bias_activation", operands, step, rate=rate)


def add_bias(loaded: Mapping[str, jax.Array]) -> jax.Array:
    """Returns x + bias, or x without a bias, in float32."""
    x = loaded["x"].astype(jnp.float32)
    return x + loaded["bias"].astype(jnp.float32) if "bias" in loaded else x


def present(operands: Mapping[str, jax.Array | None]) -> dict[str, jax.Array]:
    """Returns the operands that are not None."""
    return {name: value for name, value in operands.items() if value is not None}
