"""The linear layer with integer weights in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.ops.quantized_linear.weight import QuantizedWeight


def quantized_linear_reference(
    x: jax.Array,
    w: QuantizedWeight,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """See `pallas_kernels.quantized_linear`. The weights are rounded to x's dtype."""
    weights = w.dequantized(x.dtype)
    return linear_reference(x, weights, bias=bias, activation=activation, residual=residual, out_dtype=out_dtype)
