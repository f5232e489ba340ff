"""Study of cart-pole: what rewriting the program, and one kernel for all of it, gain over XLA's own fusion."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.primitives.random import key_words, mixed_words
from xlafuse.studies.cartpole_simulation import (
    START,
    STEPS,
    apart,
    drawn,
    drawn_apart,
    naive,
    precomputed,
    simulate_drawn,
    torch_times,
)
from xlafuse.studies.records import Claim, Conclusion, Finding, Row, Study, StudyResult
from xlafuse.studies.variants import NO_COMMAND_BUFFERS, Case, Variant, compile_all, count_variants, wall_times

_ENVIRONMENTS = (2048, 65536)
_NAIVE, _KERNEL = "naive", "one kernel, randoms drawn inside"
_LONGEST = "unroll 100"
"""The variant that takes a minute to compile."""
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "command buffers": {},
    "no command buffers": NO_COMMAND_BUFFERS,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """The same numbers in the forms that the variants take."""

    state: Any
    states: Any
    key: Any
    words: Any
    actions: Any
    resets: Any
    resets_apart: Any


def _inputs(environments: int) -> _Inputs:
    """Makes the inputs, with random numbers from `drawn`: every variant but the naive one ends in the same states."""
    key = jax.random.key(0)
    words = key_words(key)
    state = jax.random.uniform(key, (environments, 4), minval=-START, maxval=START)
    mixed, numbers = mixed_words(words), jnp.arange(environments, dtype=jnp.int32)
    step = jax.jit(jax.vmap(lambda step: drawn(mixed, numbers, step)))
    actions, resets = step(jnp.arange(STEPS, dtype=jnp.int32))
    return _Inputs(
        state=state,
        states=tuple(jnp.array(state[:, i]) for i in range(4)),
        key=key,
        words=words,
        actions=actions,
        resets=jnp.stack(resets, -1),
        resets_apart=resets,
    )


def _structs(environments: int) -> _Inputs:
    return jax.eval_shape(lambda: _inputs(environments))


def _variants(given: _Inputs, *, with_loop: bool = True) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    together = (given.state, given.actions, given.resets)
    apart_ = (given.states, given.actions, given.resets_apart)
    drawn_ = (given.states, given.words)
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        _NAIVE: (naive, (given.state, given.key)),
        "randoms precomputed": (precomputed(), together),
        "randoms precomputed, unroll 10": (precomputed(10), together),
        "no concatenate": (apart(), apart_),
        "no concatenate, unroll 10": (apart(10), apart_),
        f"no concatenate, {_LONGEST}": (apart(100), apart_),
        "no concatenate, counter-based randoms, unroll 10": (drawn_apart(10), drawn_),
    }
    if with_loop:
        found[_KERNEL] = functools.partial(simulate_drawn, steps=STEPS), drawn_
    return found


def _count(target: str) -> Iterator[Row | str]:
    kernels_too = target in ("h100", "h200")
    for environments in _ENVIRONMENTS[:1]:
        variants = _variants(_structs(environments), with_loop=kernels_too)
        cases = [
            Case(name=f"{environments} environments", arguments=arguments, variants={name: Variant(function=function)})
            for name, (function, arguments) in variants.items()
            if _LONGEST not in name
        ]
        yield f"no concatenate, {_LONGEST}: not counted, since it takes a minute to compile"
        yield from count_variants(cases, target)


def _time() -> Iterator[Row | str]:
    settings = [(environments, setting) for environments in _ENVIRONMENTS for setting in _SETTINGS]
    given = {environments: _inputs(environments) for environments in _ENVIRONMENTS}
    jobs = {}
    for environments, setting in settings:
        for name, (function, arguments) in _variants(given[environments]).items():
            if _LONGEST not in name or environments == _ENVIRONMENTS[0]:
                jobs[environments, setting, name] = function, arguments, _SETTINGS[setting]
    compiled = compile_all(jobs)
    expected: dict[int, Any] = {}
    for environments, setting in settings:
        case = f"{environments} environments, {setting}"
        calls, same = {}, {}
        for name, (_, arguments) in _variants(given[environments]).items():
            run = compiled.get((environments, setting, name))
            if run is None or isinstance(run, str):
                if run:
                    yield f"{case}, {name}: {run}"
                continue
            state = run(*arguments)
            calls[name] = functools.partial(_wait, run, arguments)
            if name != _NAIVE:
                state = state if isinstance(state, tuple) else tuple(state.T)
                same[name] = _same(state, expected.setdefault(environments, state))
        for name, values in wall_times(calls).items():
            yield Row(case=case, variant=name, values=values | _share(same, name))
    case = f"{_ENVIRONMENTS[0]} environments, command buffers"
    yield from _in_torch(case, given[_ENVIRONMENTS[0]])


def _share(same: Mapping[str, float], name: str) -> dict[str, float]:
    return {"same_trajectories": same[name]} if name in same else {}


def _wait(run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return jax.block_until_ready(run(*arguments))


def _same(state: Any, expected: Any) -> float:
    """Returns the share of environments that end in the reference's state, up to rounding."""
    near = [jnp.abs(a - b) < 1e-3 for a, b in zip(state, expected, strict=True)]
    return float(jnp.mean(near[0] & near[1] & near[2] & near[3]))


def _in_torch(case: str, given: _Inputs) -> Iterator[Row | str]:
    try:
        for name, values in torch_times(given.states, given.actions, given.resets_apart).items():
            yield Row(case=case, variant=name, values=values)
    except Exception as error:
        yield f"PyTorch: {type(error).__name__}: {str(error)[:300]}"


def _conclude(result: StudyResult) -> Conclusion:
    cases = {setting: f"{_ENVIRONMENTS[0]} environments, {setting}" for setting in _SETTINGS}
    plain = [name for name in _variants(_structs(128), with_loop=False) if name != _NAIVE]
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
