"""Tables of cosines and sines of positions' angles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def angle_tables(
    positions: jax.Array, head_size: int, theta: float, dtype: DTypeLike = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Computes cosines and sines of positions' angles, (..., head_size / 2) each, in `dtype`."""
    half = head_size // 2
    frequency = float(theta) ** (-np.arange(half, dtype=np.float64) / half)
    angle = positions.astype(dtype)[..., None] * frequency.astype(dtype)
    return jnp.cos(angle), jnp.sin(angle)
