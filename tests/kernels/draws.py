"""Random arrays that NumPy draws: for each shape JAX would compile a program, of a tenth to half a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Of mean 0 and deviation 1, drawn in float32."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.dtype(dtype)))


def integers(seed: int, shape: Sequence[int], minimum: int, maximum: int, dtype: Any = jnp.int32) -> jax.Array:
    """From minimum to below maximum."""
    return jnp.asarray(np.random.default_rng(seed).integers(minimum, maximum, shape, jnp.dtype(dtype)))
