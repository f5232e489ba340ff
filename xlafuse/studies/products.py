"""Shared parts of the studies of matrix products: shapes, norms, and a barrier that separates launches.

Weights are (features, outputs), as in `pallas_kernels.linear`; sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.norms.reference import layer_norm_reference, rms_norm_reference

ROWS = (1, 16, 512, 8192)
"""Tokens: decoding one sequence and sixteen, a short prompt, a training batch."""


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns an abstract bfloat16 array."""
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def apart(value: Any) -> Any:
    """Forces the value into memory: XLA fuses nothing across the barrier."""
    return jax.lax.optimization_barrier(value)


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes x @ w with float32 sums, in x's dtype."""
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


rms: Callable[..., jax.Array] = partial(rms_norm_reference, epsilon=1e-6)  # pyright: ignore[reportAssignmentType]
layer: Callable[..., jax.Array] = partial(layer_norm_reference, epsilon=1e-5)  # pyright: ignore[reportAssignmentType]
"""Norms of each row, with a scale, and for `layer` a bias. They return one array where no sum is asked for."""
