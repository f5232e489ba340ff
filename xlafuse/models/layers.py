"""Rotary embedding, softmax and attention in plain JAX, without any help for XLA.

Arrays are (batch, length, ...); attention uses the layout BTNH (batch, length, heads, head_dim). Sums and exponentials
are computed in float32, or in float64 for float64 input; results have the input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def rotation(positions: Array, head_dim: int, *, theta: float, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Returns cosine and sine of the rotary angles at `positions` (B, T), each (B, T, 1, head_dim / 2)."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    angle = positions[..., None, None].astype(dtype) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, cosine: Array, sine: Array) -> Array:
    """Applies the rotary embedding to `x` (B, T, N, H), with pairs half a head apart (arXiv:2104.09864)."""
    first, second = jnp.split(x.astype(cosine.dtype), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)


def softmax(scores: Array, *, scale: float, is_causal: bool) -> Array:
    """Softmax of scaled scores (..., queries, keys)."""
    scores = scores * scale
    if is_causal:
        queries, keys = scores.shape[-2:]
        visible = jnp.arange(queries)[:, None] >= jnp.arange(keys)[None, :]
        scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    return jax.nn.softmax(scores, axis=-1)


def attention(
    query: Array, key: Array, value: Array, *, is_causal: bool, softmax: Callable[..., Array] = softmax
) -> Array:
    """Scaled dot-product attention that materializes the scores and never repeats K and V over the query groups.

    `query` is (B, T, N, H), `key` and `value` are (B, S, K, H) where K divides N. Returns (B, T, N, H).
    """
    head_dim = query.shape[-1]
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, head_dim)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=wide)
    weights = softmax(scores, scale=head_dim**-0.5, is_causal=is_causal).astype(query.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)
