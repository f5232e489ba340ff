"""The gradient of a graph network: messages of gathered nodes, an MLP on edges, sums of each node's messages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

LAYERS, NODES, EDGES, WIDTH = 2, 4000, 20000, 128


def layer_norm(x: Array, scale: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * scale


def mlp(weights: dict[str, Array], x: Array) -> Array:
    return layer_norm(jax.nn.relu(x @ weights["first"] + weights["bias"]) @ weights["second"], weights["scale"])


def loss(weights: dict[str, Any], nodes: Array, edges: Array, senders: Array, receivers: Array) -> Array:
    for layer in weights["layers"]:
        edges = edges + mlp(layer["edge"], jnp.concatenate([edges, nodes[senders], nodes[receivers]], -1))
        received = jax.ops.segment_sum(edges, receivers, NODES)
        nodes = nodes + mlp(layer["node"], jnp.concatenate([nodes, received], -1))
    return jnp.square(nodes @ weights["out"]).mean()


def step(weights: dict[str, Any], nodes: Array, edges: Array, senders: Array, receivers: Array) -> dict[str, Any]:
    return jax.grad(loss)(weights, nodes, edges, senders, receivers)


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def weights(parts: int) -> dict[str, Any]:
        first, second = array(parts * WIDTH, WIDTH), array(WIDTH, WIDTH)
        return {"first": first, "second": second, "bias": array(WIDTH), "scale": array(WIDTH)}

    layers = [{"edge": weights(3), "node": weights(2)}] * LAYERS
    indices = array(EDGES, dtype=jnp.int32)
    return {"layers": layers, "out": array(WIDTH, 1)}, array(NODES, WIDTH), array(EDGES, WIDTH), indices, indices
