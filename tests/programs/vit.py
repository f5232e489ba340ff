"""A training step of a vision transformer: patches, a class token, float32 weights and bfloat16 work, Adam."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

LAYERS, WIDTH, HEADS, CLASSES = 2, 384, 6, 1000
BATCH, SIZE, PATCH = 32, 224, 16
OPTIMIZER = optax.adam(1e-3)


def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-6) * scale + bias).astype(x.dtype)


def linear(weights: dict[str, Array], name: str, x: Array) -> Array:
    return x @ weights[name].astype(x.dtype) + weights[f"{name}_bias"].astype(x.dtype)


def attention(weights: dict[str, Array], x: Array) -> Array:
    query, key, value = (
        linear(weights, name, x).reshape(*x.shape[:2], HEADS, WIDTH // HEADS) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / (WIDTH // HEADS) ** 0.5
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)
    return linear(weights, "out", out.reshape(x.shape))


def loss(weights: dict[str, Any], images: Array, labels: Array) -> Array:
    side = SIZE // PATCH
    patches = images.astype(jnp.bfloat16).reshape(BATCH, side, PATCH, side, PATCH, 3).swapaxes(2, 3)
    x = linear(weights, "patch", patches.reshape(BATCH, side * side, PATCH * PATCH * 3))
    token = jnp.broadcast_to(weights["token"].astype(x.dtype), (BATCH, 1, WIDTH))
    x = jnp.concatenate([token, x], 1) + weights["positions"].astype(x.dtype)
    for layer in weights["layers"]:
        x = x + attention(layer, layer_norm(x, layer["scale1"], layer["bias1"]))
        h = layer_norm(x, layer["scale2"], layer["bias2"])
        x = x + linear(layer, "down", jax.nn.gelu(linear(layer, "up", h), approximate=False))
    x = layer_norm(x[:, 0], weights["scale"], weights["bias"])
    logits = linear(weights, "head", x.astype(jnp.float32))
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES) * 0.9 + 0.1 / CLASSES).mean()


def step(weights: dict[str, Any], state: Any, images: Array, labels: Array) -> tuple[Any, ...]:
    value, gradients = jax.value_and_grad(loss)(weights, images, labels)
    updates, state = OPTIMIZER.update(gradients, state)
    return optax.apply_updates(weights, updates), state, value


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def linear(name: str, rows: int, columns: int) -> dict[str, Any]:
        return {name: array(rows, columns), f"{name}_bias": array(columns)}

    layer = dict.fromkeys(("scale1", "bias1", "scale2", "bias2"), array(WIDTH))
    for name in ("query", "key", "value", "out"):
        layer |= linear(name, WIDTH, WIDTH)
    layer |= linear("up", WIDTH, 4 * WIDTH) | linear("down", 4 * WIDTH, WIDTH)
    weights = {"token": array(WIDTH), "positions": array((SIZE // PATCH) ** 2 + 1, WIDTH), "layers": [layer] * LAYERS}
    weights |= linear("patch", PATCH * PATCH * 3, WIDTH) | linear("head", WIDTH, CLASSES)
    weights |= dict.fromkeys(("scale", "bias"), array(WIDTH))
    images, labels = array(BATCH, SIZE, SIZE, 3), array(BATCH, dtype=jnp.int32)
    return weights, jax.eval_shape(OPTIMIZER.init, weights), images, labels
