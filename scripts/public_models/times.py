"""Times the forward pass or training step of a public model on the attached GPU, with and without `xlafuse.fuse`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlafuse.bench.timing import Candidate, time_candidates
from xlafuse.fusion import fuse

TOLERANCE = 0.05
"""Largest accepted difference, by the norm; both programs compute in bfloat16."""


def timed(
    fn: Callable[..., Any],
    outer: Callable[[Any], Any],
    arguments: tuple[Any, ...],
    checked: Callable[[Any], Any],
) -> dict[str, Any]:
    """Times `outer(fn)` and `outer(fuse(fn))` in turns.

    checked: picks what to compare from their results.

    Returns:
        "gpu": its kind. "before" and "after": the sum of a call's kernel times and the wall clock of a call among
        several in flight, in microseconds, and the number of kernels. "error": the norm of the difference over that of
        the results.
    """
    programs = {"before": outer(fn), "after": outer(fuse(fn))}
    with ThreadPoolExecutor(2) as pool:  # XLA compiles a program on one core
        made = pool.map(lambda program: jax.jit(program).lower(*arguments).compile(), programs.values())
        compiled = dict(zip(programs, made, strict=True))
    error = difference(*(checked(each(*arguments)) for each in compiled.values()))
    if not error < TOLERANCE:
        raise ArithmeticError(f"results differ by {error:.3g} of the norm")
    run = time_candidates(
        [Candidate(name=name, kind="strategy", call=call, inputs=[arguments]) for name, call in compiled.items()],
        rounds=6,
        calls=3,
    )
    if run.failures:
        raise RuntimeError(str(dict(run.failures)))
    times = {
        name: {"us": round(each.median_us, 1), "wall_us": round(each.wall_us, 1), "kernels": len(each.kernels)}
        for name, each in run.timings.items()
    }
    return {"gpu": jax.devices()[0].device_kind, **times, "error": float(np.format_float_scientific(error, 2))}


def difference(result: Any, expected: Any) -> float:
    """Returns the norm of the difference of all floating arrays over the norm of what is expected."""
    leaves = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    sums = [sums_of_squares(a, b) for a, b in leaves if jnp.issubdtype(a.dtype, jnp.floating)]
    return float(np.sqrt(np.divide(*np.sum(np.asarray(sums, np.float64), axis=0))))


@jax.jit
def sums_of_squares(result: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of the squares of the difference and of what is expected."""
    result, expected = result.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.sum((result - expected) ** 2), jnp.sum(expected**2)
