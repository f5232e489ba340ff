"""The normalised linear layer in plain `jax.numpy`: the definition, and the implementation `"xla"`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arguments import Norm
from pallas_kernels.ops._products.norm import norm_reference
from pallas_kernels.ops.linear.reference import linear_reference


def norm_linear_reference(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: Norm,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    multiply: Callable[..., jax.Array] = jnp.matmul,
) -> jax.Array:
    """See `pallas_kernels.norm_linear`. The normalised x is rounded to x's dtype; the rest is as in `linear`."""
    others = {"bias": bias, "activation": activation, "residual": residual, "out_dtype": out_dtype}
    return linear_reference(norm_reference(norm, x), w, **others, multiply=multiply)
