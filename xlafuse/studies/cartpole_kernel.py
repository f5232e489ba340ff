"""The whole cart-pole simulation in one Mosaic GPU kernel, with states in registers and the loop over steps inside.

Each thread simulates one environment. A step is about forty instructions, each of which waits for the one before. This
chain sets the time, not memory. Sine, cosine and the one division are therefore short polynomials in the squared angle.
The angle stays below 0.21 rad, since a fallen pole starts again, and there they are exact to float32. Random numbers
that are arguments come through a ring in shared memory, with several steps in a copy and several copies ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.random import mixed_words
from xlafuse.studies.cartpole_simulation import (
    FALLEN,
    FORCE,
    GRAVITY,
    HALF_LENGTH,
    POLE_MASS,
    POLE_MOMENT,
    SECONDS,
    TOTAL_MASS,
    TRACK,
    State,
    drawn,
)

LANES = 128
_CHUNK = 8
"""Steps in one copy of the random numbers: 4 KB of each of the five arrays."""
_STAGES = 4
_LAYOUT = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
_PARAMETERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


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


def _step(state: State, action, reset: State) -> State:
    position, velocity, angle, spin = state
    square = angle * angle
    sine = angle * _polynomial(square, (1.0, -1 / 6, 1 / 120, -1 / 5040))
    cosine = _polynomial(square, (1.0, -1 / 2, 1 / 24, -1 / 720))
    inverse = _polynomial(square, _INVERSE)
    force = jnp.where(action == 1, jnp.float32(FORCE / TOTAL_MASS), jnp.float32(-FORCE / TOTAL_MASS))
    push = force + spin * spin * (sine * (POLE_MOMENT / TOTAL_MASS))
    turning = (GRAVITY * sine - cosine * push) * inverse
    pulling = push - turning * (cosine * (POLE_MOMENT / TOTAL_MASS))
    after = (
        position + SECONDS * velocity,
        velocity + SECONDS * pulling,
        angle + SECONDS * spin,
        spin + SECONDS * turning,
    )
    over = (jnp.abs(after[0]) > TRACK) | (jnp.abs(after[2]) > FALLEN)
    return tuple(jnp.where(over, new, old) for new, old in zip(reset, after, strict=True))


def simulate_given(state: State, actions: jax.Array, resets: State) -> State:
    """Runs the simulation on given random numbers.

    Args:
        state: four (environments,) float32 arrays, angles within +-0.2094 rad. The number of environments is a multiple
            of 128.
        actions: (steps, environments) int32, 0 or 1; the number of steps is a multiple of 8.
        resets: four (steps, environments) float32 arrays.
    """
    environments, steps = _checked(state[0]), actions.shape[0]
    if steps % _CHUNK:
        raise ValueError(f"expected a multiple of {_CHUNK} steps, got {steps}.")
    chunks = steps // _CHUNK

    def body(*refs):
        starts, randoms, ends = refs[:4], refs[4:9], refs[9:13]
        buffers, arrived = refs[13:18], refs[18]
        mine = pl.ds(lax.axis_index("block") * LANES, LANES)

        def fetch(chunk):
            stage = lax.rem(chunk, _STAGES)
            for source, buffer in zip(randoms, buffers, strict=True):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(chunk * _CHUNK, _CHUNK), mine], buffer.at[stage], arrived.at[stage]
                )

        for chunk in range(min(_STAGES - 1, chunks)):
            fetch(jnp.int32(chunk))

        def run(chunk, state):
            stage = lax.rem(chunk, _STAGES)
            plgpu.barrier_wait(arrived.at[stage])
            for i in range(_CHUNK):
                action, *reset = (plgpu.load(b.at[stage, i], layout=_LAYOUT, optimized=False) for b in buffers)
                state = _step(state, action, tuple(reset))
                if i == 0:
                    # Every thread has now read the stage before this one.
                    @pl.when(chunk + (_STAGES - 1) < chunks)
                    def _():
                        plgpu.commit_smem()
                        fetch(chunk + (_STAGES - 1))

            return state

        state = tuple(plgpu.load(ref.at[mine], layout=_LAYOUT, optimized=False) for ref in starts)
        for ref, value in zip(ends, lax.fori_loop(0, chunks, run, state), strict=True):
            ref[mine] = value

    dtypes = (jnp.int32, *(jnp.float32,) * 4)
    return settings.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((environments,), jnp.float32),) * 4,
        grid=(environments // LANES,),
        grid_names=("block",),
        scratch_types=[
            *(plgpu.SMEM((_STAGES, _CHUNK, LANES), dtype) for dtype in dtypes),
            plgpu.Barrier(num_arrivals=len(dtypes), num_barriers=_STAGES),
        ],
        compiler_params=_PARAMETERS,
    )(*state, actions, *resets)


def simulate_drawn(state: State, key: jax.Array, *, steps: int) -> State:
    """Runs the simulation; the kernel draws the numbers of `cartpole_simulation.drawn`. key: (2,) uint32."""
    environments = _checked(state[0])

    def body(*refs):
        starts, key_ref, ends = refs[:4], refs[4], refs[5:9]
        first = lax.axis_index("block") * LANES
        mine = pl.ds(first, LANES)
        words = mixed_words(key_ref)
        environment = first + plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=_LAYOUT)

        def run(number, state):
            action, reset = drawn(words, environment, number)
            return _step(state, action, reset)

        state = tuple(plgpu.load(ref.at[mine], layout=_LAYOUT, optimized=False) for ref in starts)
        for ref, value in zip(ends, lax.fori_loop(0, steps, run, state), strict=True):
            ref[mine] = value

    return settings.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((environments,), jnp.float32),) * 4,
        grid=(environments // LANES,),
        grid_names=("block",),
        compiler_params=_PARAMETERS,
    )(*state, key)


def _checked(values: jax.Array) -> int:
    if values.ndim != 1 or values.size % LANES:
        raise ValueError(f"expected a multiple of {LANES} environments in one dimension, got shape {values.shape}.")
    return values.size
