"""A training step of a ResNet-18 written with Flax NNX: batch norm, SGD with momentum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

BATCH, SIZE, CLASSES = 32, 112, 1000
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Block(nnx.Module):
    def __init__(self, given: int, features: int, stride: int, *, rngs: nnx.Rngs) -> None:
        def conv(given: int, size: int, stride: int) -> nnx.Conv:
            return nnx.Conv(
                given, features, (size, size), (stride, stride), use_bias=False, dtype=jnp.bfloat16, rngs=rngs
            )

        self.conv1, self.conv2 = conv(given, 3, stride), conv(features, 3, 1)
        self.norm1, self.norm2 = nnx.BatchNorm(features, rngs=rngs), nnx.BatchNorm(features, rngs=rngs)
        changes = stride > 1 or given != features
        self.shortcut = nnx.data(conv(given, 1, stride) if changes else None)

    def __call__(self, x: Array) -> Array:
        h = nnx.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return nnx.relu(h + (x if self.shortcut is None else self.shortcut(x))).astype(jnp.bfloat16)


class ResNet(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 64, (7, 7), (2, 2), use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        sizes = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2),
                 (512, 512, 1))  # fmt: skip
        self.blocks = nnx.List([Block(*size, rngs=rngs) for size in sizes])
        self.head = nnx.Linear(512, CLASSES, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.relu(self.norm(self.stem(x))).astype(jnp.bfloat16)
        x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)).astype(jnp.float32))


GRAPH = nnx.graphdef(nnx.eval_shape(lambda: ResNet(rngs=nnx.Rngs(0))))


def loss(weights: Any, statistics: Any, images: Array, labels: Array) -> tuple[Array, Any]:
    model = nnx.merge(GRAPH, weights, statistics, copy=True)
    logits = model(images)
    value = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return value, nnx.split(model, nnx.Param, ...)[2]


def step(weights: Any, statistics: Any, state: Any, images: Array, labels: Array) -> tuple[Any, ...]:
    (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(weights, statistics, images, labels)
    updates, state = OPTIMIZER.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), statistics, state, value


def arguments() -> tuple[Any, ...]:
    model = nnx.eval_shape(lambda: ResNet(rngs=nnx.Rngs(0)))
    _, weights, statistics = nnx.split(model, nnx.Param, ...)
    images = jax.ShapeDtypeStruct((BATCH, SIZE, SIZE, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    return weights, statistics, jax.eval_shape(OPTIMIZER.init, weights), images, labels
