"""The gradient of a BERT encoder with a masked-language loss: norms after the sums, masked tokens gathered."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

LAYERS, WIDTH, HEADS, VOCABULARY = 2, 768, 12, 30522
BATCH, LENGTH, MASKED = 8, 512, 76


def layer_norm(x: Array, weights: Array) -> Array:
    wide = x.astype(jnp.float32)
    normed = jax.nn.standardize(wide, axis=-1, epsilon=1e-12)
    return (normed * weights[0] + weights[1]).astype(x.dtype)


def attention(weights: dict[str, Array], x: Array, is_token: Array) -> Array:
    query, key, value = (
        (x @ weights[name] + weights[f"{name}_bias"]).reshape(BATCH, LENGTH, HEADS, -1).swapaxes(1, 2)
        for name in ("query", "key", "value")
    )
    scores = query @ key.swapaxes(2, 3) / (WIDTH // HEADS) ** 0.5
    scores = scores + jnp.where(is_token, 0, -1e9)[:, None, None, :].astype(x.dtype)
    out = (jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype) @ value).swapaxes(1, 2)
    return out.reshape(BATCH, LENGTH, WIDTH) @ weights["out"] + weights["out_bias"]


def loss(weights: dict[str, Any], tokens: Array, segments: Array, places: Array, targets: Array) -> Array:
    x = weights["embedding"][tokens] + weights["positions"] + weights["segments"][segments]
    x = layer_norm(x, weights["norm"])
    for layer in weights["layers"]:
        x = layer_norm(x + attention(layer, x, tokens > 0), layer["norm1"])
        h = jax.nn.gelu(x @ layer["up"] + layer["up_bias"], approximate=False)
        x = layer_norm(x + h @ layer["down"] + layer["down_bias"], layer["norm2"])
    x = jnp.take_along_axis(x, places[..., None], 1)
    x = layer_norm(jax.nn.gelu(x @ weights["transform"], approximate=False), weights["head_norm"])
    logits = (x @ weights["embedding"].T + weights["head_bias"]).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def step(weights: dict[str, Any], tokens: Array, segments: Array, places: Array, targets: Array) -> tuple[Any, ...]:
    return jax.value_and_grad(loss)(weights, tokens, segments, places, targets)


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    norm = array(2, WIDTH, dtype=jnp.float32)
    layer = {"norm1": norm, "norm2": norm, "up": array(WIDTH, 4 * WIDTH), "up_bias": array(4 * WIDTH)}
    layer |= {"down": array(4 * WIDTH, WIDTH), "down_bias": array(WIDTH)}
    for name in ("query", "key", "value", "out"):
        layer |= {name: array(WIDTH, WIDTH), f"{name}_bias": array(WIDTH)}
    weights = {"embedding": array(VOCABULARY, WIDTH), "positions": array(LENGTH, WIDTH), "segments": array(2, WIDTH)}
    weights |= {"norm": norm, "head_norm": norm, "transform": array(WIDTH, WIDTH), "head_bias": array(VOCABULARY)}
    tokens, places = array(BATCH, LENGTH, dtype=jnp.int32), array(BATCH, MASKED, dtype=jnp.int32)
    return weights | {"layers": [layer] * LAYERS}, tokens, tokens, places, places
