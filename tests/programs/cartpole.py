"""Many carts with poles for many steps, as one writes them first: stacked positions, random numbers in each step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

CARTS, STEPS = 2048, 1000


def advance(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
    state, key = carry
    key, action_key, start_key = jax.random.split(key, 3)
    x, speed, angle, turning = state.T
    force = jnp.where(jax.random.bernoulli(action_key, 0.5, x.shape), 10.0, -10.0)
    push = (force + 0.05 * turning**2 * jnp.sin(angle)) / 1.1
    turn = (9.8 * jnp.sin(angle) - jnp.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    moved = (speed, push - 0.05 * turn * jnp.cos(angle) / 1.1, turning, turn)
    state = jnp.stack([old + 0.02 * new for old, new in zip((x, speed, angle, turning), moved, strict=True)], 1)
    is_over = (jnp.abs(state[:, 0]) > 2.4) | (jnp.abs(state[:, 2]) > 0.2)
    start = jax.random.uniform(start_key, state.shape, minval=-0.05, maxval=0.05)
    return (jnp.where(is_over[:, None], start, state), key), None


def step(state: Array, seed: Array) -> Array:
    return jax.lax.scan(advance, (state, jax.random.wrap_key_data(seed)), None, length=STEPS)[0][0]


def arguments() -> tuple[Any, ...]:
    return jax.ShapeDtypeStruct((CARTS, 4), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.uint32)
