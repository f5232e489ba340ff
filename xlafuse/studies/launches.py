"""Study of the cost of a launch: a chain of kernels that do almost nothing, launched in four ways."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.studies.products import apart
from xlafuse.studies.records import Claim, Conclusion, Finding, Row, Study, StudyResult
from xlafuse.studies.variants import NO_COMMAND_BUFFERS, Case, Variant, count_variants, wall_times

_HOST, _LOOP, _PROGRAM, _BUFFER = (
    "from the host, one by one",
    "a loop on the device, without command buffers",
    "one program, without command buffers",
    "one program, in a command buffer",
)
_SHORT, _LONG = 100, 300
"""Kernels in a chain; the difference of two lengths cancels the cost of the call itself."""
_CASE = "a kernel of 1024 values"


def _touch(x: jax.Array) -> jax.Array:
    return x * 1.0001 + 1.0


def chain(x: jax.Array, count: int) -> jax.Array:
    """Makes `count` launches in sequence."""
    for _ in range(count):
        x = apart(_touch(x))
    return x


def loop(x: jax.Array, count: int) -> jax.Array:
    """Makes a loop with `count` iterations."""
    return jax.lax.fori_loop(0, count, lambda _, x: _touch(x), x)


def _forms(count: int) -> dict[str, Variant]:
    return {
        _LOOP: Variant(function=functools.partial(loop, count=count), options=NO_COMMAND_BUFFERS),
        _PROGRAM: Variant(function=functools.partial(chain, count=count), options=NO_COMMAND_BUFFERS),
        _BUFFER: Variant(function=functools.partial(chain, count=count)),
    }


def _count(target: str) -> Iterator[Row | str]:
    struct = jax.ShapeDtypeStruct((1024,), jnp.float32)
    yield from count_variants([Case(name=_CASE, arguments=(struct,), variants=_forms(_SHORT))], target)


def _time() -> Iterator[Row | str]:
    x = jnp.ones(1024)
    step = jax.jit(_touch)
    calls: dict[str, Callable[[], Any]] = {}
    for count in (_SHORT, _LONG):
        calls[f"{_HOST} {count}"] = functools.partial(_from_host, step, x, count)
        for name, variant in _forms(count).items():
            run = jax.jit(variant.function).lower(x).compile(compiler_options=dict(variant.options))
            calls[f"{name} {count}"] = functools.partial(lambda run: jax.block_until_ready(run(x)), run)
    times = wall_times(calls, rounds=21)
    for name in (_HOST, _LOOP, _PROGRAM, _BUFFER):
        each = (times[f"{name} {_LONG}"]["us"] - times[f"{name} {_SHORT}"]["us"]) / (_LONG - _SHORT)
        yield Row(case=_CASE, variant=name, values={"us": each, "call_us": times[f"{name} {_SHORT}"]["us"]})


def _from_host(step: Callable[..., Any], x: jax.Array, count: int) -> Any:
    for _ in range(count):
        x = step(x)
    return jax.block_until_ready(x)


def _conclude(result: StudyResult) -> Conclusion:
    found = {name: result.value(_CASE, name, "us") for name in (_HOST, _LOOP, _PROGRAM, _BUFFER)}
    return Conclusion(
        sentences=(
            f"One more launch from the host costs {found[_HOST]:.1f} µs in JAX, most of it Python and dispatch.",
            f"Inside one program it costs {found[_PROGRAM]:.2f} µs, and in a command buffer {found[_BUFFER]:.2f} µs: "
            f"{found[_PROGRAM] / found[_BUFFER]:.1f} times less.",
            f"A trip of a loop on the device, whose counter is a launch too, costs {found[_LOOP]:.2f} µs.",
        ),
        findings=(
            Finding(
                ours=f"{found[_HOST]:.1f} µs from the host, {found[_PROGRAM]:.1f} µs in a program, "
                f"{found[_BUFFER]:.2f} µs in a command buffer",
                verdict="holds" if found[_HOST] >= 5 else "does not hold",
                reason="The published cost is that of a launch from the host; XLA launches from C++ or from a graph.",
            ),
        ),
    )


STUDY = Study(
    name="launches",
    title="What a launch costs",
    claims=(Claim("A launch costs time", "5 to 10 µs", "Fusion as annotated code"),),
    count=_count,
    time=_time,
    conclude=_conclude,
)
