"""The gradient of the linear layer with integer weights, except for the weights, by XLA.

The forward pass saves only its arguments. XLA computes the product again if an activation needs it.
"""

from __future__ import annotations

import jax

from pallas_kernels.ops.quantized_linear.reference import quantized_linear_reference
from pallas_kernels.ops.quantized_linear.weight import QuantizedWeight


def quantized_linear_backward(
    x: jax.Array,
    w: QuantizedWeight,
    bias: jax.Array | None,
    dy: jax.Array,
    *,
    activation: str | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (dx, dbias), dbias None without a bias. x: (rows, features), dy: (rows, outputs)."""

    def forward(x, bias):
        return quantized_linear_reference(x, w, bias=bias, activation=activation, out_dtype=dy.dtype)

    return jax.vjp(forward, x, bias)[1](dy)
