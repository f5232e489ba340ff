"""The loss and gradient of a language model as Haiku's example: float32, a fused query-key-value, one-hot labels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

LAYERS, WIDTH, HEADS, VOCABULARY = 2, 256, 4, 10000
BATCH, LENGTH = 8, 256


def layer_norm(x: Array, scale: Array, offset: Array) -> Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return scale * jax.lax.rsqrt(variance + 1e-5) * (x - mean) + offset


def linear(weights: dict[str, Array], name: str, x: Array) -> Array:
    return x @ weights[name] + weights[f"{name}_bias"]


def attention(weights: dict[str, Array], x: Array) -> Array:
    query, key, value = (
        part.reshape(BATCH, LENGTH, HEADS, WIDTH // HEADS) for part in jnp.split(linear(weights, "qkv", x), 3, -1)
    )
    scores = jnp.einsum("bthd,bThd->bhtT", query, key) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e30)
    out = jnp.einsum("bhtT,bThd->bthd", jax.nn.softmax(scores), value)
    return linear(weights, "out", out.reshape(BATCH, LENGTH, WIDTH))


def loss(weights: dict[str, Any], tokens: Array, targets: Array) -> Array:
    x = weights["embedding"][tokens] + weights["positions"]
    for layer in weights["layers"]:
        x = x + attention(layer, layer_norm(x, layer["scale1"], layer["offset1"]))
        h = layer_norm(x, layer["scale2"], layer["offset2"])
        x = x + linear(layer, "down", jax.nn.gelu(linear(layer, "up", h)))
    logits = linear(weights, "logits", layer_norm(x, weights["scale"], weights["offset"]))
    labels = jax.nn.one_hot(targets, VOCABULARY)
    mask = targets > 0
    return -jnp.sum(jnp.sum(labels * jax.nn.log_softmax(logits), -1) * mask) / jnp.sum(mask)


def step(weights: dict[str, Any], tokens: Array, targets: Array) -> tuple[Array, dict[str, Any]]:
    return jax.value_and_grad(loss)(weights, tokens, targets)


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def with_biases(sizes: dict[str, tuple[int, int]]) -> dict[str, Any]:
        return {name: array(*size) for name, size in sizes.items()} | {
            f"{name}_bias": array(size[1]) for name, size in sizes.items()
        }

    layer = with_biases({"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH)})
    layer |= with_biases({"down": (4 * WIDTH, WIDTH)})
    layer |= dict.fromkeys(("scale1", "scale2", "offset1", "offset2"), array(WIDTH))
    weights = {"embedding": array(VOCABULARY, WIDTH), "positions": array(LENGTH, WIDTH), "layers": [layer] * LAYERS}
    weights |= with_biases({"logits": (WIDTH, VOCABULARY)}) | dict.fromkeys(("scale", "offset"), array(WIDTH))
    tokens = array(BATCH, LENGTH, dtype=jnp.int32)
    return weights, tokens, tokens
