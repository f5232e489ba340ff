"""Shared parts of the studies of matrix products: shapes, norms, and a barrier that separates launches.

Weights are (features, outputs), as in `pallas_kernels.linear`; sums are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.studies.variants import Variant

ROWS = (1, 16, 512, 8192)
"""Tokens: decoding one sequence and sixteen, a short prompt, a training batch."""


TORCH_ROWS = (16, 512, 8192)
"""Rows at which PyTorch is timed too; torch.compile takes seconds a shape."""


def at(rows: int, variants: Mapping[str, Variant]) -> dict[str, Variant]:
    """Returns the variants to time at this number of tokens."""
    return {name: each for name, each in variants.items() if each.framework == "jax" or rows in TORCH_ROWS}


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns an abstract bfloat16 array."""
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def apart(value: Any) -> Any:
    """Forces the value into memory: XLA fuses nothing across the barrier."""
    return jax.lax.optimization_barrier(value)


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes x @ w with float32 sums, in x's dtype."""
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Computes the RMSNorm of each row, with epsilon 1e-6."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)


def layer(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Computes the LayerNorm of each row, with epsilon 1e-5."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    return (centred * inverse * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
