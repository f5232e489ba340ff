"""Cart-pole for many environments at once: the physics, and its simulation in JAX, in PyTorch and in one kernel.

The state of an environment is position, velocity, angle and angular velocity, float32. Each step has two random inputs:
an action, 0 or 1, and the state to start from again if the pole has fallen or the cart has left the track.

Source: Barto, Sutton, Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems",
1983, with the constants of Gym's CartPole. The variants follow Snider and Liang, "Operator Fusion in XLA: Analysis and
Evaluation", 2023, https://arxiv.org/abs/2301.13062.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.random import mixed_words, random_bits
from xlafuse.studies.variants import wall_times

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


def physics(state: State, action: Any, library: Any = jnp) -> State:
    """Returns the state after one step of Euler's method, as the literature writes it.

    library: whose arrays these are, `jax.numpy` or `torch`.
    """
    *_, angle, spin = state
    force = library.where(action == 1, FORCE, -FORCE)
    cosine, sine = library.cos(angle), library.sin(angle)
    push = (force + POLE_MOMENT * spin * spin * sine) / TOTAL_MASS
    torque = GRAVITY * sine - cosine * push
    turning = torque / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cosine * cosine / TOTAL_MASS))
    pulling = push - POLE_MOMENT * turning * cosine / TOTAL_MASS
    return _moved(state, pulling, turning)


def _moved(state: State, pulling: Any, turning: Any) -> State:
    position, velocity, angle, spin = state
    return (
        position + SECONDS * velocity,
        velocity + SECONDS * pulling,
        angle + SECONDS * spin,
        spin + SECONDS * turning,
    )


def _is_over(position: Any, angle: Any) -> Any:
    """Tells whether the cart has left the track or the pole has fallen."""
    return (abs(position) > TRACK) | (abs(angle) > FALLEN)


def _restarted(after: State, reset: State, library: Any = jnp) -> State:
    over = _is_over(after[0], after[2])
    return tuple(library.where(over, new, old) for new, old in zip(reset, after, strict=True))


def advance(state: State, action: Any, reset: State, library: Any = jnp) -> State:
    """Does a step with the state in four arrays, and starts again from `reset` where that is over."""
    return _restarted(physics(state, action, library), reset, library)


def _together(state: jax.Array, action: jax.Array, reset: jax.Array) -> jax.Array:
    """Does a step with the state in one (environments, 4) array."""
    after = jnp.stack(physics(tuple(state[:, i] for i in range(4)), action), 1)
    return jnp.where(_is_over(after[:, 0], after[:, 2])[:, None], reset, after)


def naive(state: jax.Array, key: jax.Array) -> jax.Array:
    """First version: keeps the state in one (environments, 4) array and draws random numbers in each step."""

    def step(carry, _):
        state, key = carry
        key, for_action, for_reset = jax.random.split(key, 3)
        action = jax.random.randint(for_action, state.shape[:1], 0, 2)
        reset = jax.random.uniform(for_reset, state.shape, minval=-START, maxval=START)
        return (_together(state, action, reset), key), None

    return lax.scan(step, (state, key), None, length=STEPS)[0][0]


def precomputed(unroll: int = 1) -> Callable[..., jax.Array]:
    """Takes the random numbers as arguments: actions (steps, environments) int32, resets (steps, environments, 4)."""
    return _simulation(_together, unroll)


def apart(unroll: int = 1) -> Callable[..., State]:
    """Keeps the state in four arrays, so that nothing is concatenated; resets are four (steps, environments) arrays."""
    return _simulation(advance, unroll)


def _simulation(step: Callable[..., Any], unroll: int) -> Callable[..., Any]:
    def simulate(state, actions, resets):
        return lax.scan(lambda state, each: (step(state, *each), None), state, (actions, resets), unroll=unroll)[0]

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
            return advance(state, *drawn(words, environment, number)), None

        return lax.scan(step, state, jnp.arange(steps, dtype=jnp.int32), unroll=unroll)[0]

    return simulate


def torch_times(states: Any, actions: Any, resets: Any) -> dict[str, dict[str, float]]:
    """Returns host times of the simulation in PyTorch, eager and compiled, as `wall_times` gives them."""
    import torch  # pyright: ignore[reportMissingImports]

    from xlafuse.bench.peers.tensors import to_torch

    state, begins, rows = tuple(map(to_torch, states)), tuple(map(to_torch, resets)), to_torch(actions)

    def steps(state, actions, resets):
        for i in range(actions.shape[0]):
            state = advance(state, actions[i], tuple(each[i] for each in resets), torch)
        return state

    def simulate(step: Any, stride: int) -> None:
        now = state
        with torch.no_grad():
            for i in range(0, rows.shape[0], stride):
                now = step(now, rows[i : i + stride], tuple(each[i : i + stride] for each in begins))
        torch.cuda.synchronize()

    compiled = torch.compile(steps, dynamic=False, fullgraph=True)
    calls = {
        "PyTorch eager": lambda: simulate(steps, 1),
        "torch.compile": lambda: simulate(compiled, 1),
        "torch.compile, unroll 10": lambda: simulate(compiled, 10),
    }
    return wall_times(calls, rounds=3)


THREADS = 128
"""Threads of a block; each has an environment in registers."""
_LAYOUT = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


def _polynomial(square, coefficients: Sequence[float]):
    value = jnp.float32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * square + coefficient
    return value


_SHARE = POLE_MASS / TOTAL_MASS
_A0 = HALF_LENGTH * (4 / 3 - _SHARE)


def _inverse_moment() -> tuple[float, ...]:
    """Returns 1 / (l (4/3 - m cos(a)**2 / M)) as a series in a**2; the first dropped term is below 1e-8 of it."""
    # The denominator is _A0 (1 + d) with d = k (u - u^2/3 + 2 u^3/45), u = a**2.
    k = HALF_LENGTH * _SHARE / _A0
    first, second, third = k, -k / 3, 2 * k / 45
    return tuple(c / _A0 for c in (1.0, -first, first**2 - second, 2 * first * second - third - first**3))


_INVERSE = _inverse_moment()


def _short_step(state: State, action, reset: State) -> State:
    """Does `advance` without sines and cosines.

    A step is about forty instructions, each of which waits for the one before. This chain sets the time, not memory.
    Sine, cosine and the one division are therefore short polynomials in the squared angle. The angle stays below
    0.21 rad, since a fallen pole starts again, and there they are exact to float32.
    """
    *_, angle, spin = state
    square = angle * angle
    sine = angle * _polynomial(square, (1.0, -1 / 6, 1 / 120, -1 / 5040))
    cosine = _polynomial(square, (1.0, -1 / 2, 1 / 24, -1 / 720))
    inverse = _polynomial(square, _INVERSE)
    force = jnp.where(action == 1, jnp.float32(FORCE / TOTAL_MASS), jnp.float32(-FORCE / TOTAL_MASS))
    push = force + spin * spin * (sine * (POLE_MOMENT / TOTAL_MASS))
    turning = (GRAVITY * sine - cosine * push) * inverse
    pulling = push - turning * (cosine * (POLE_MOMENT / TOTAL_MASS))
    return _restarted(_moved(state, pulling, turning), reset)


def simulate_drawn(state: State, key: jax.Array, *, steps: int) -> State:
    """Runs the simulation in one kernel, which draws the numbers of `drawn`.

    Args:
        state: four (environments,) float32 arrays, angles within ±0.2094 rad; a multiple of 128 environments.
        key: (2,) uint32.
        steps: number of steps.
    """
    environments = state[0].size
    if state[0].ndim != 1 or environments % THREADS:
        raise ValueError(f"expected a multiple of {THREADS} environments in one dimension, got shape {state[0].shape}.")

    def body(*refs):
        starts, key_ref, ends = refs[:4], refs[4], refs[5:9]
        first = lax.axis_index("block") * THREADS
        mine = pl.ds(first, THREADS)
        words = mixed_words(key_ref)
        environment = first + plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=_LAYOUT)

        def run(number, state):
            action, reset = drawn(words, environment, number)
            return _short_step(state, action, reset)

        state = tuple(plgpu.load(ref.at[mine], layout=_LAYOUT, optimized=False) for ref in starts)
        for ref, value in zip(ends, lax.fori_loop(0, steps, run, state), strict=True):
            ref[mine] = value

    return settings.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((environments,), jnp.float32),) * 4,
        grid=(environments // THREADS,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(*state, key)
