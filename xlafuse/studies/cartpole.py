"""Study of cart-pole: what rewriting the program, and one kernel for all of it, gain over XLA's own fusion.

The state of an environment is position, velocity, angle and angular velocity, float32. Each step has two random inputs:
an action, 0 or 1, and the state to start from again if the pole has fallen or the cart has left the track.

Source: Barto, Sutton, Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems",
1983, with the constants of Gym's CartPole. The variants follow Snider and Liang, "Operator Fusion in XLA: Analysis and
Evaluation", 2023, https://arxiv.org/abs/2301.13062.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.random import key_words, mixed_words, random_bits
from xlafuse.studies.records import Claim, Conclusion, Finding, Row, Study, StudyResult
from xlafuse.studies.variants import NO_COMMAND_BUFFERS, Case, Variant, compile_all, count_variants, wall_times

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
    _, velocity, _, spin = state
    changes = velocity, pulling, spin, turning
    return tuple(value + SECONDS * change for value, change in zip(state, changes, strict=True))


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


def precomputed(unroll: int = 1, step: Callable[..., Any] = _together) -> Callable[..., Any]:
    """Takes the random numbers as arguments: actions (steps, environments) int32, resets (steps, environments, 4)."""

    def simulate(state, actions, resets):
        return lax.scan(lambda state, each: (step(state, *each), None), state, (actions, resets), unroll=unroll)[0]

    return simulate


apart = partial(precomputed, step=advance)
"""Keeps the state in four arrays, so that nothing is concatenated; resets are four (steps, environments) arrays."""


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
    wide = (half.astype(jnp.int32).astype(jnp.float32) for half in halves)
    return action.astype(jnp.int32), tuple((each - 32767.5) * (START / 32768) for each in wide)


def drawn_apart(unroll: int = 1, steps: int = STEPS) -> Callable[..., State]:
    """Simulates as `apart` does, but `drawn` draws each step's random numbers. key: (2,) uint32."""

    def simulate(state, key):
        words, environment = mixed_words(key), jnp.arange(state[0].size, dtype=jnp.int32)

        def step(state, number):
            return advance(state, *drawn(words, environment, number)), None

        return lax.scan(step, state, jnp.arange(steps, dtype=jnp.int32), unroll=unroll)[0]

    return simulate


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


_ENVIRONMENTS = (2048, 65536)
_NAIVE, _KERNEL, _LONGEST = "naive", "one kernel, randoms drawn inside", "no concatenate, unroll 100"
_FORMS: Mapping[str, tuple[Callable[..., Any], str]] = {
    _NAIVE: (naive, "naive"),
    "randoms precomputed": (precomputed(), "together"),
    "randoms precomputed, unroll 10": (precomputed(10), "together"),
    "no concatenate": (apart(), "apart"),
    "no concatenate, unroll 10": (apart(10), "apart"),
    _LONGEST: (apart(100), "apart"),
    "no concatenate, counter-based randoms, unroll 10": (drawn_apart(10), "drawn"),
    _KERNEL: (partial(simulate_drawn, steps=STEPS), "drawn"),
}
"""The variants, each with the form of its inputs; the longest takes a minute to compile."""
_SETTINGS: Mapping[str, Mapping[str, Any]] = {"command buffers": {}, "no command buffers": NO_COMMAND_BUFFERS}


def _inputs(environments: int) -> dict[str, tuple[Any, ...]]:
    """Makes the inputs in each form, with random numbers from `drawn`: all but the naive one end in the same states."""
    key = jax.random.key(0)
    words = key_words(key)
    state = jax.random.uniform(key, (environments, 4), minval=-START, maxval=START)
    states = tuple(jnp.array(state[:, i]) for i in range(4))
    mixed, numbers = mixed_words(words), jnp.arange(environments, dtype=jnp.int32)
    step = jax.jit(jax.vmap(lambda step: drawn(mixed, numbers, step)))
    actions, resets = step(jnp.arange(STEPS, dtype=jnp.int32))
    return {
        "naive": (state, key),
        "together": (state, actions, jnp.stack(resets, -1)),
        "apart": (states, actions, resets),
        "drawn": (states, words),
    }


def _count(target: str) -> Iterator[Row | str]:
    given = jax.eval_shape(lambda: _inputs(_ENVIRONMENTS[0]))
    cases = [
        Case(
            name=f"{_ENVIRONMENTS[0]} environments",
            arguments=given[form],
            variants={name: Variant(function=function, is_counted=name != _KERNEL or target in ("h100", "h200"))},
        )
        for name, (function, form) in _FORMS.items()
        if name != _LONGEST
    ]
    yield f"{_LONGEST}: not counted, since it takes a minute to compile"
    yield from count_variants(cases, target)


def _time() -> Iterator[Row | str]:
    given = {environments: _inputs(environments) for environments in _ENVIRONMENTS}
    jobs = {
        (environments, setting, name): (function, given[environments][form], options)
        for environments in _ENVIRONMENTS
        for setting, options in _SETTINGS.items()
        for name, (function, form) in _FORMS.items()
        if name != _LONGEST or environments == _ENVIRONMENTS[0]
    }
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    for job, run in compile_all(jobs).items():
        case, name = f"{job[0]} environments, {job[1]}", job[2]
        if isinstance(run, str):
            yield f"{case}, {name}: {run}"
        else:
            calls.setdefault(case, {})[name] = partial(_finished, run, jobs[job][1])
    for case, variants in calls.items():
        ends = {name: call() for name, call in variants.items() if name != _NAIVE}
        states = [end if isinstance(end, tuple) else tuple(end.T) for end in ends.values()]
        same = {name: {"same_trajectories": _same(each, states[0])} for name, each in zip(ends, states, strict=True)}
        for name, values in wall_times(variants).items():
            yield Row(case=case, variant=name, values=values | same.get(name, {}))
    try:
        for name, values in _torch_times(*given[_ENVIRONMENTS[0]]["apart"]).items():
            yield Row(case=f"{_ENVIRONMENTS[0]} environments, command buffers", variant=name, values=values)
    except Exception as error:
        yield f"PyTorch: {type(error).__name__}: {str(error)[:300]}"


def _finished(run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return jax.block_until_ready(run(*arguments))


def _same(state: State, expected: State) -> float:
    """Returns the share of environments that end in the reference's state, up to rounding."""
    near = [jnp.abs(a - b) < 1e-3 for a, b in zip(state, expected, strict=True)]
    return float(jnp.mean(near[0] & near[1] & near[2] & near[3]))


def _torch_times(states: Any, actions: Any, resets: Any) -> dict[str, dict[str, float]]:
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


def _conclude(result: StudyResult) -> Conclusion:
    cases = {setting: f"{_ENVIRONMENTS[0]} environments, {setting}" for setting in _SETTINGS}
    plain = [name for name in _FORMS if name not in (_NAIVE, _KERNEL)]
    best = {setting: max((result.ratio(case, name, _NAIVE), name) for name in plain) for setting, case in cases.items()}
    kernel = {setting: result.ratio(case, _KERNEL, _NAIVE) for setting, case in cases.items()}
    many = f"{_ENVIRONMENTS[1]} environments, command buffers"
    on, off = "command buffers", "no command buffers"
    gain_off, gain_on = best[off][0], best[on][0]
    return Conclusion(
        sentences=(
            f"At {_ENVIRONMENTS[0]} environments, changing the JAX program alone ({best[off][1]}) makes it "
            f"{gain_off:.1f} times as fast without command buffers, and {gain_on:.1f} times with them, which make each "
            "launch cheaper for the naive program too.",
            f"One kernel for all steps ({_KERNEL}) is {kernel[off]:.0f} times as fast as the naive "
            f"program without command buffers, {kernel[on]:.0f} times with them: "
            f"{result.value(cases[on], _KERNEL, 'us') / STEPS * 1e3:.0f} ns a step.",
            f"At {_ENVIRONMENTS[1]} environments it gains {result.ratio(many, _KERNEL, _NAIVE):.1f} times: "
            "there is more work in a launch, and less of the time is launching.",
        ),
        findings=(
            Finding(
                ours=f"{gain_off:.1f} × without command buffers, {gain_on:.1f} × with them ({best[off][1]})",
                verdict="holds" if gain_off >= 10.56 else "does not hold",
                reason="The published GPU had no command buffers, which take half of the naive program's time away.",
            ),
            Finding(
                ours=f"{kernel[off]:.0f} × without command buffers, {kernel[on]:.0f} × with them",
                verdict="holds" if kernel[off] > gain_off else "does not hold",
                reason="The states stay in registers for all steps, so there is one launch.",
            ),
        ),
    )


STUDY = Study(
    name="cartpole",
    title="Cart-pole simulation",
    claims=(
        Claim(
            "Changing how the program is written for fusion beats XLA's defaults",
            "up to 10.56 ×",
            "Kernel Fusion, after Snider and Liang 2023",
        ),
        Claim(
            "One custom kernel beats what XLA makes of any of them",
            "a custom kernel is the fastest",
            "Kernel Fusion, after Snider and Liang 2023",
        ),
    ),
    count=_count,
    time=_time,
    conclude=_conclude,
)
