"""One pass of a decoder as Gemma's: RMSNorm of (1 + scale), rotary embedding, grouped queries, soft caps, GeGLU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

LAYERS, WIDTH, HEADS, GROUPS, SIZE, HIDDEN, VOCABULARY = 2, 1024, 8, 2, 128, 4096, 32768
BATCH, LENGTH = 2, 1024


def rms_norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    return (normed * (1 + scale.astype(jnp.float32))).astype(x.dtype)


def rope(x: Array) -> Array:
    frequencies = 10000.0 ** (-jnp.arange(SIZE // 2) / (SIZE // 2))
    angles = (jnp.arange(x.shape[1])[:, None] * frequencies)[None, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1).astype(x.dtype)


def attention(weights: dict[str, Array], x: Array) -> Array:
    query = rope(jnp.einsum("btd,dnh->btnh", x, weights["query"])) * SIZE**-0.5
    key = rope(jnp.einsum("btd,dkh->btkh", x, weights["key"]))
    value = jnp.einsum("btd,dkh->btkh", x, weights["value"])
    query = query.reshape(BATCH, LENGTH, GROUPS, HEADS // GROUPS, SIZE)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key).astype(jnp.float32)
    scores = jnp.tanh(scores / 50) * 50
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -2.4e38)
    probabilities = jax.nn.softmax(scores).astype(x.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", probabilities, value).reshape(BATCH, LENGTH, HEADS, SIZE)
    return jnp.einsum("btnh,nhd->btd", out, weights["out"])


def step(weights: dict[str, Any], tokens: Array) -> Array:
    x = weights["embedding"][tokens] * jnp.asarray(WIDTH**0.5, jnp.bfloat16)
    for layer in weights["layers"]:
        x = x + rms_norm(attention(layer, rms_norm(x, layer["norm1"])), layer["norm2"])
        h = rms_norm(x, layer["norm3"])
        h = jax.nn.gelu(h @ layer["gate"]) * (h @ layer["up"])
        x = x + rms_norm(h @ layer["down"], layer["norm4"])
    logits = rms_norm(x[:, -1], weights["norm"]) @ weights["embedding"].T
    return jnp.tanh(logits / 30) * 30


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    layer = {"query": array(WIDTH, HEADS, SIZE), "out": array(HEADS, SIZE, WIDTH)}
    layer |= dict.fromkeys(("key", "value"), array(WIDTH, GROUPS, SIZE))
    layer |= {"gate": array(WIDTH, HIDDEN), "up": array(WIDTH, HIDDEN), "down": array(HIDDEN, WIDTH)}
    layer |= dict.fromkeys(("norm1", "norm2", "norm3", "norm4"), array(WIDTH))
    weights = {"embedding": array(VOCABULARY, WIDTH), "norm": array(WIDTH), "layers": [layer] * LAYERS}
    return weights, array(BATCH, LENGTH, dtype=jnp.int32)
