"""A training step of a recommender as DLRM: embedding bags, products of all pairs, two MLPs, Adagrad."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

BATCH, DENSE, TABLES, ROWS, BAG, WIDTH = 2048, 13, 8, 50000, 4, 64
BOTTOM, TOP = (DENSE, 512, 256, WIDTH), (WIDTH + (TABLES + 1) * TABLES // 2, 512, 256, 1)
OPTIMIZER = optax.adagrad(0.01)


def mlp(layers: list[tuple[Array, Array]], x: Array) -> Array:
    for number, (kernel, bias) in enumerate(layers):
        x = x @ kernel + bias
        x = jax.nn.relu(x) if number < len(layers) - 1 else x
    return x


def loss(weights: dict[str, Any], dense: Array, sparse: Array, clicks: Array) -> Array:
    x = jax.nn.relu(mlp(weights["bottom"], dense))
    bags = [table[indices].sum(1) for table, indices in zip(weights["tables"], sparse, strict=True)]
    features = jnp.stack([x, *bags], 1)
    pairs = jnp.einsum("bfd,bgd->bfg", features, features)
    first, second = np.tril_indices(TABLES + 1, -1)
    logits = mlp(weights["top"], jnp.concatenate([x, pairs[:, first, second]], -1))[:, 0]
    return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()


def step(weights: dict[str, Any], state: Any, dense: Array, sparse: Array, clicks: Array) -> tuple[Any, ...]:
    value, gradients = jax.value_and_grad(loss)(weights, dense, sparse, clicks)
    updates, state = OPTIMIZER.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, value


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def layers(sizes: tuple[int, ...]) -> list[tuple[Any, Any]]:
        return [(array(given, made), array(made)) for given, made in pairwise(sizes)]

    weights = {"bottom": layers(BOTTOM), "top": layers(TOP), "tables": [array(ROWS, WIDTH)] * TABLES}
    sparse = array(TABLES, BATCH, BAG, dtype=jnp.int32)
    return weights, jax.eval_shape(OPTIMIZER.init, weights), array(BATCH, DENSE), sparse, array(BATCH)
