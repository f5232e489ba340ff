"""Cart-pole for many environments at once: the physics, and ways to write its simulation in JAX.

The state of an environment is position, velocity, angle and angular velocity, float32. Each step has two random inputs:
an action, 0 or 1, and the state to start from again if the pole has fallen or the cart has left the track.

Source: Barto, Sutton, Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems",
1983, with the constants of Gym's CartPole. The variants follow Snider and Liang, "Operator Fusion in XLA: Analysis and
Evaluation", 2023, https://arxiv.org/abs/2301.13062.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.random import mixed_words, random_bits

GRAVITY, POLE_MASS, TOTAL_MASS, HALF_LENGTH, FORCE, SECONDS = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02
POLE_MOMENT = POLE_MASS * HALF_LENGTH
TRACK = 2.4
"""Metres to either side."""
FALLEN = 12 * 2 * math.pi / 360
"""Radians to either side: 0.2094."""
START = 0.05
"""A new state is uniform in [-START, START]."""
STEPS = 1000

State = tuple[Any, ...]
"""Four arrays: position, velocity, angle, angular velocity."""


def physics(state: State, action: Any) -> State:
    """Returns the state after one step of Euler's method, as the literature writes it."""
    position, velocity, angle, spin = state
    force = jnp.where(action == 1, FORCE, -FORCE)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    push = (force + POLE_MOMENT * spin * spin * sine) / TOTAL_MASS
    torque = GRAVITY * sine - cosine * push
    turning = torque / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cosine * cosine / TOTAL_MASS))
    pulling = push - POLE_MOMENT * turning * cosine / TOTAL_MASS
    return (
        position + SECONDS * velocity,
        velocity + SECONDS * pulling,
        angle + SECONDS * spin,
        spin + SECONDS * turning,
    )


def is_over(position, angle):
    """Tells whether the cart has left the track or the pole has fallen."""
    return (jnp.abs(position) > TRACK) | (jnp.abs(angle) > FALLEN)


def naive(state: jax.Array, key: jax.Array) -> jax.Array:
    """First version: keeps the state in one (environments, 4) array and draws random numbers in each step."""

    def step(carry, _):
        state, key = carry
        key, for_action, for_reset = jax.random.split(key, 3)
        action = jax.random.randint(for_action, state.shape[:1], 0, 2)
        after = jnp.stack(physics(tuple(state[:, i] for i in range(4)), action), 1)
        reset = jax.random.uniform(for_reset, state.shape, minval=-START, maxval=START)
        return (jnp.where(is_over(after[:, 0], after[:, 2])[:, None], reset, after), key), None

    return lax.scan(step, (state, key), None, length=STEPS)[0][0]


def precomputed(unroll: int = 1) -> Callable[..., jax.Array]:
    """Takes the random numbers as arguments: actions (steps, environments) int32, resets (steps, environments, 4)."""

    def simulate(state, actions, resets):
        def step(state, randoms):
            action, reset = randoms
            after = jnp.stack(physics(tuple(state[:, i] for i in range(4)), action), 1)
            return jnp.where(is_over(after[:, 0], after[:, 2])[:, None], reset, after), None

        return lax.scan(step, state, (actions, resets), unroll=unroll)[0]

    return simulate


def apart(unroll: int = 1) -> Callable[..., State]:
    """Keeps the state in four arrays, so that nothing is concatenated; resets are four (steps, environments) arrays."""

    def simulate(state, actions, resets):
        def step(state, randoms):
            action, reset = randoms
            after = physics(state, action)
            over = is_over(after[0], after[2])
            return tuple(jnp.where(over, new, old) for new, old in zip(reset, after, strict=True)), None

        return lax.scan(step, state, (actions, resets), unroll=unroll)[0]

    return simulate


_COLUMNS = 4096
"""Random words of an environment: each of the first 1024 holds the actions of 32 steps, the others hold resets."""


def drawn(words, environment, step) -> tuple[jax.Array, State]:
    """Draws action and reset of environments at a step, from a counter-based generator that kernels can use too.

    An action is one bit of a word that 32 steps share. The values of a reset take 16 bits each, from two words.

    Args:
        words: result of `mixed_words`.
        environment: the environments' numbers, integers.
        step: an int32 scalar, below 1536.
    """

    def word(column):
        return random_bits(words, environment, column, features=_COLUMNS)

    action = (word(step >> 5) >> (step & 31).astype(jnp.uint32)) & jnp.uint32(1)
    pairs = [word(1024 + 2 * step + part) for part in range(2)]
    halves = [half for pair in pairs for half in (pair >> jnp.uint32(16), pair & jnp.uint32(0xFFFF))]
    position, velocity, angle, spin = (_scaled(half) for half in halves)
    return action.astype(jnp.int32), (position, velocity, angle, spin)


def _scaled(half):
    return (half.astype(jnp.int32).astype(jnp.float32) - 32767.5) * (START / 32768)


def drawn_apart(unroll: int = 1, steps: int = STEPS) -> Callable[..., State]:
    """Like `apart`, but draws the random numbers in each step with `drawn`; key: (2,) uint32."""

    def simulate(state, key):
        words, environment = mixed_words(key), jnp.arange(state[0].size, dtype=jnp.int32)

        def step(state, number):
            action, reset = drawn(words, environment, number)
            after = physics(state, action)
            over = is_over(after[0], after[2])
            return tuple(jnp.where(over, new, old) for new, old in zip(reset, after, strict=True)), None

        return lax.scan(step, state, jnp.arange(steps, dtype=jnp.int32), unroll=unroll)[0]

    return simulate
