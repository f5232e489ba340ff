"""The gradient of a mixture of experts: the two best of eight for each token, with a capacity."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 4096, 512, 1024, 8, 2
CAPACITY = TOKENS * CHOSEN // EXPERTS * 5 // 4


def rms_norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def layer(weights: dict[str, Array], x: Array) -> tuple[Array, Array]:
    h = rms_norm(x, weights["scale"])
    probabilities = jax.nn.softmax((h @ weights["router"]).astype(jnp.float32))
    shares, chosen = jax.lax.top_k(probabilities, CHOSEN)
    shares = (shares / shares.sum(-1, keepdims=True)).reshape(-1)
    is_chosen = jax.nn.one_hot(chosen.reshape(-1), EXPERTS, dtype=jnp.int32)
    places = ((jnp.cumsum(is_chosen, 0) - 1) * is_chosen).sum(-1)  # of a token among those of its expert
    rows = jnp.where(places < CAPACITY, chosen.reshape(-1) * CAPACITY + places, EXPERTS * CAPACITY)
    given = jnp.zeros((EXPERTS * CAPACITY, WIDTH), x.dtype).at[rows].set(jnp.repeat(h, CHOSEN, 0), mode="drop")
    given = given.reshape(EXPERTS, CAPACITY, WIDTH)
    gate, up = (jnp.einsum("ecd,edh->ech", given, weights[name]) for name in ("gate", "up"))
    made = jnp.einsum("ech,ehd->ecd", jax.nn.silu(gate) * up, weights["down"]).reshape(-1, WIDTH)
    taken = jnp.take(made, rows, 0, mode="fill", fill_value=0) * shares[:, None].astype(x.dtype)
    balance = EXPERTS * (probabilities.mean(0) * is_chosen.astype(jnp.float32).mean(0)).sum()
    return x + taken.reshape(TOKENS, CHOSEN, WIDTH).sum(1), balance


def loss(weights: dict[str, Array], x: Array) -> Array:
    out, balance = layer(weights, x)
    return jnp.square(out.astype(jnp.float32)).mean() + 0.01 * balance


def step(weights: dict[str, Array], x: Array) -> dict[str, Array]:
    return jax.grad(loss)(weights, x)


def arguments() -> tuple[Any, ...]:
    def array(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    weights = {"scale": array(WIDTH), "router": array(WIDTH, EXPERTS), "down": array(EXPERTS, HIDDEN, WIDTH)}
    weights |= dict.fromkeys(("gate", "up"), array(EXPERTS, WIDTH, HIDDEN))
    return weights, array(TOKENS, WIDTH)
