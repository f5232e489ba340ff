"""A norm of few rows in the product's own launch: when the kernel can do it.

A gradient needs the normalised x, and goes by the norm's own launch. That takes 1.5 to 2 µs on an H200, as long as
memory needs for 8 MB of weights.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Norm
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.few_rows.norm import RowNorm


def has_norm_inside(config: Any, norm: Norm | None, x: jax.Array) -> bool:
    """Whether the product's launch does the norm of x: where the configuration says so, and the kernel of few rows can,
    an RMS norm of bfloat16 whose mean squares are not known."""
    if norm is None or not isinstance(config, FewRowsConfig) or not config.norm_inside:
        return False
    return norm.kind == "rms" and norm.mean_square is None and x.dtype == jnp.bfloat16


def row_norm(norm: Norm) -> RowNorm:
    """That norm, as the kernel takes it."""
    return RowNorm(epsilon=float(norm.epsilon), scale=None if norm.scale is None else jnp.asarray(norm.scale))
