"""A training step of a language model as Flax's lm1b: dropout, tied embeddings, cross-entropy, AdamW."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY = 2, 512, 8, 2048, 30000
BATCH, LENGTH, RATE = 16, 128, 0.1
OPTIMIZER = optax.adamw(1e-3, weight_decay=0.1)


def dropout(x: Array, key: Array) -> Array:
    return jnp.where(jax.random.bernoulli(key, 1 - RATE, x.shape), x / (1 - RATE), 0).astype(x.dtype)


def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    return (centred * inverse * scale + bias).astype(x.dtype)


def attention(weights: dict[str, Array], x: Array, key: Array) -> Array:
    query, keys, value = (
        jnp.einsum("btd,dhk->bthk", x, weights[name].astype(x.dtype)) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bthk,bshk->bhts", query, keys) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    probabilities = dropout(jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype), key)
    return jnp.einsum(
        "bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", probabilities, value), weights["out"].astype(x.dtype)
    )


def loss(weights: dict[str, Any], tokens: Array, targets: Array, key: Array) -> Array:
    keys = jax.random.split(key, 4 * LAYERS + 1)
    x = weights["embedding"].astype(jnp.bfloat16)[tokens] + weights["positions"].astype(jnp.bfloat16)
    x = dropout(x, keys[-1])
    for number, layer in enumerate(weights["layers"]):
        first, second, third, fourth = keys[4 * number : 4 * number + 4]
        h = attention(layer, layer_norm(x, layer["scale1"], layer["bias1"]), first)
        x = x + dropout(h, second)
        h = layer_norm(x, layer["scale2"], layer["bias2"]) @ layer["up"].astype(x.dtype)
        h = dropout(jax.nn.relu(h), third) @ layer["down"].astype(x.dtype)
        x = x + dropout(h, fourth)
    x = layer_norm(x, weights["scale"], weights["bias"])
    logits = (x @ weights["embedding"].astype(x.dtype).T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def step(weights: dict[str, Any], state: Any, tokens: Array, targets: Array, seed: Array) -> tuple[Any, ...]:
    key = jax.random.wrap_key_data(seed)
    value, gradients = jax.value_and_grad(loss)(weights, tokens, targets, key)
    updates, state = OPTIMIZER.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, value


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    heads = array(WIDTH, HEADS, WIDTH // HEADS)
    layer = {"query": heads, "key": heads, "value": heads, "out": array(HEADS, WIDTH // HEADS, WIDTH)}
    layer |= {"up": array(WIDTH, HIDDEN), "down": array(HIDDEN, WIDTH)}
    layer |= dict.fromkeys(("scale1", "bias1", "scale2", "bias2"), array(WIDTH))
    weights = {"embedding": array(VOCABULARY, WIDTH), "positions": array(LENGTH, WIDTH), "layers": [layer] * LAYERS}
    weights |= {"scale": array(WIDTH), "bias": array(WIDTH)}
    tokens = array(BATCH, LENGTH, dtype=jnp.int32)
    return weights, jax.eval_shape(OPTIMIZER.init, weights), tokens, tokens, array(2, dtype=jnp.uint32)
