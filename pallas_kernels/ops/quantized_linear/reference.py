"""The linear layer with integer weights in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.ops.quantized_linear.weight import QuantizedWeight


def quantized_linear_reference(x: jax.Array, w: QuantizedWeight, **options: Any) -> jax.Array:
    """See `pallas_kernels.quantized_linear`. The weights are rounded to x's dtype; options are `linear_reference`'s."""
    return linear_reference(x, w.dequantized(x.dtype), **options)
