"""Bias, activation and dropout backward on Mosaic GPU: one pass reads x and dy and writes dx.

The dropout mask is made again from the key. With a bias, its gradient is the column sums of dx (see `column_sums`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ops.bias_activation.column_sums import column_sum_kernel
from pallas_kernels.ops.bias_activation.config import ColumnSumConfig, ElementwiseConfig, default_column_sum
from pallas_kernels.ops.bias_activation.mosaic_gpu import add_bias, elementwise_kernel, fold, present
from pallas_kernels.primitives.activations import Activation


def bias_activation_backward(
    x: jax.Array,
    bias: jax.Array | None,
    words: jax.Array | None,
    dy: jax.Array,
    *,
    activation: Activation,
    rate: float = 0.0,
    config: ElementwiseConfig | ColumnSumConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (dx, dbias), or (dx, None) without a bias. Arguments as of the forward kernel; dy like x."""
    shape = x.shape
    x, bias, dy = fold(x, bias, dy)
    operands = present({"x": x, "bias": bias, "words": words, "dy": dy})
    # As accurate as the more accurate of the two gradients shows.
    shown = x.dtype if bias is None else jnp.promote_types(x.dtype, bias.dtype)

    def step(row, part, loaded, keep):
        dy = loaded["dy"].astype(jnp.float32)
        if keep is not None:
            dy = keep(dy, row, part)
        return dy * activation.value_and_derivative(add_bias(loaded), shown)[1]

    if bias is None:
        assert not isinstance(config, ColumnSumConfig)
        return elementwise_kernel("bias_activation_gradient", operands, step, rate=rate, config=config), None
    assert not isinstance(config, ElementwiseConfig)
    config = config or default_column_sum(x.shape[0], x.dtype.itemsize)
    dx, dbias = column_sum_kernel(operands, step, features=shape[1], rate=rate, config=config)
    return dx.reshape(shape), dbias
