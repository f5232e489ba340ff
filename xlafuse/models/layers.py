"""Norms, rotary embedding and attention in plain JAX, without any help for XLA.

Arrays are (batch, length, ...); attention uses the layout BTNH (batch, length, heads, head_dim). Sums and exponentials
are computed in float32, or in float64 for float64 input; results have the input's dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def _accumulator(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def rms_norm(x: Array, scale: Array, *, epsilon: float) -> Array:
    """Root-mean-square norm over the last axis: `x / sqrt(mean(x**2) + epsilon) * scale` (arXiv:1910.07467)."""
    wide = x.astype(_accumulator(x))
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * inverse * scale.astype(wide.dtype)).astype(x.dtype)


def layer_norm(x: Array, scale: Array, bias: Array, *, epsilon: float) -> Array:
    """Layer norm over the last axis: `(x - mean) / sqrt(var + epsilon) * scale + bias` (arXiv:1607.06450)."""
    wide = x.astype(_accumulator(x))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    return (centred * inverse * scale.astype(wide.dtype) + bias.astype(wide.dtype)).astype(x.dtype)


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


def attention(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
    """Scaled dot-product attention that materializes the scores and never repeats K and V over the query groups.

    `query` is (B, T, N, H), `key` and `value` are (B, S, K, H) where K divides N. Returns (B, T, N, H).
    """
    batch, length, heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[1:3]
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    wide = _accumulator(query)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=wide) * head_dim**-0.5
    if is_causal:
        visible = jnp.arange(length)[:, None] >= jnp.arange(kv_length)[None, :]
        scores = jnp.where(visible, scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(query.shape)
