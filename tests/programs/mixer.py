"""The gradient of an MLP-Mixer in bfloat16: token-mixing and channel-mixing MLPs, then mean pooling."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

LAYERS, WIDTH, TOKENS, CHANNELS, CLASSES = 2, 512, 256, 2048, 1000
BATCH, SIZE, PATCH = 32, 224, 16
COUNT = (SIZE // PATCH) ** 2
NUMBERS = ("NHWC", "HWIO", "NHWC")


def layer_norm(weights: dict[str, Array], x: Array) -> Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred / jnp.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    return (normed * weights["scale"] + weights["bias"]).astype(x.dtype)


def mlp(weights: dict[str, Array], x: Array) -> Array:
    h = jax.nn.gelu(x @ weights["up"] + weights["up_bias"])
    return h @ weights["down"] + weights["down_bias"]


def loss(weights: dict[str, Any], images: Array, labels: Array) -> Array:
    images = images.astype(jnp.bfloat16)
    x = jax.lax.conv_general_dilated(images, weights["patch"], (PATCH, PATCH), "VALID", dimension_numbers=NUMBERS)
    x = x.reshape(BATCH, COUNT, WIDTH)
    for layer in weights["layers"]:
        x = x + mlp(layer["token"], layer_norm(layer["norm1"], x).swapaxes(1, 2)).swapaxes(1, 2)
        x = x + mlp(layer["channel"], layer_norm(layer["norm2"], x))
    x = layer_norm(weights["norm"], x).mean(1).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(x @ weights["head"], labels).mean()


def step(weights: dict[str, Any], images: Array, labels: Array) -> tuple[Array, dict[str, Any]]:
    return jax.value_and_grad(loss)(weights, images, labels)


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def mlp(given: int, hidden: int) -> dict[str, Any]:
        biases = {"up_bias": array(hidden), "down_bias": array(given)}
        return biases | {"up": array(given, hidden), "down": array(hidden, given)}

    norm = dict.fromkeys(("scale", "bias"), array(WIDTH, dtype=jnp.float32))
    layer = {"token": mlp(COUNT, TOKENS), "channel": mlp(WIDTH, CHANNELS), "norm1": norm, "norm2": norm}
    weights = {"patch": array(PATCH, PATCH, 3, WIDTH), "layers": [layer] * LAYERS, "norm": norm}
    weights |= {"head": array(WIDTH, CLASSES, dtype=jnp.float32)}
    return weights, array(BATCH, SIZE, SIZE, 3, dtype=jnp.float32), array(BATCH, dtype=jnp.int32)
