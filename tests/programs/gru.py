"""The gradient of a GRU over a sequence, a cell in a scan, as Equinox's example has it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

BATCH, LENGTH, FEATURES, HIDDEN = 64, 128, 64, 256


def cell(weights: dict[str, Array], hidden: Array, x: Array) -> Array:
    given = jnp.split(x @ weights["input"] + weights["bias"], 3, -1)
    kept = jnp.split(hidden @ weights["hidden"], 3, -1)
    reset, update = jax.nn.sigmoid(given[0] + kept[0]), jax.nn.sigmoid(given[1] + kept[1])
    new = jnp.tanh(given[2] + reset * (kept[2] + weights["new_bias"]))
    return new + update * (hidden - new)


def loss(weights: dict[str, Array], sequences: Array, labels: Array) -> Array:
    def advance(hidden: Array, x: Array) -> tuple[Array, None]:
        return cell(weights, hidden, x), None

    hidden, _ = jax.lax.scan(advance, jnp.zeros((BATCH, HIDDEN)), sequences.swapaxes(0, 1))
    logits = (hidden @ weights["out"])[:, 0]
    return jnp.mean(jnp.logaddexp(logits, 0) - labels * logits)


def step(weights: dict[str, Array], sequences: Array, labels: Array) -> tuple[Array, dict[str, Array]]:
    return jax.value_and_grad(loss)(weights, sequences, labels)


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    weights = {"input": array(FEATURES, 3 * HIDDEN), "hidden": array(HIDDEN, 3 * HIDDEN), "bias": array(3 * HIDDEN)}
    weights |= {"new_bias": array(HIDDEN), "out": array(HIDDEN, 1)}
    return weights, array(BATCH, LENGTH, FEATURES), array(BATCH)
