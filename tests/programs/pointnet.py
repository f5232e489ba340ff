"""The gradient of a PointNet for segmentation: features of a whole cloud are joined to those of each of its points."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

CLOUDS, POINTS, CLASSES = 16, 4096, 50
LOCAL, GLOBAL = (3, 64, 128), (128, 512, 1024)
HEAD = (LOCAL[-1] + GLOBAL[-1], 256, 128, CLASSES)


def mlp(layers: list[dict[str, Array]], x: Array) -> Array:
    for layer in layers:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x


def loss(weights: dict[str, Any], points: Array, labels: Array) -> Array:
    local = mlp(weights["local"], points)
    pooled = mlp(weights["global"], local).max(1)
    spread = jnp.broadcast_to(pooled[:, None], (*local.shape[:-1], pooled.shape[-1]))
    first, *rest = weights["head"]
    h = jax.nn.relu(jnp.concatenate([local, spread], -1) @ first["weight"] + first["bias"])
    logits = mlp(rest[:-1], h) @ rest[-1]["weight"] + rest[-1]["bias"]
    return -jnp.where(jnp.arange(CLASSES) == labels[..., None], jax.nn.log_softmax(logits), 0).sum(-1).mean()


def step(weights: dict[str, Any], points: Array, labels: Array) -> dict[str, Any]:
    return jax.grad(loss)(weights, points, labels)


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def layers(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
        return [{"weight": array(fan_in, size), "bias": array(size)} for fan_in, size in pairwise(sizes)]

    weights = {"local": layers(LOCAL), "global": layers(GLOBAL), "head": layers(HEAD)}
    return weights, array(CLOUDS, POINTS, 3), array(CLOUDS, POINTS, dtype=jnp.int32)
