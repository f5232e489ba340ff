"""Times forward pass and training step of a public model on the attached GPU, with and without `xlafuse.fuse`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlafuse.bench.timing import Candidate, time_candidates
from xlafuse.fusion import fuse
from xlafuse.studies.variants import compile_all

TOLERANCE = 0.05
"""Largest accepted difference of an output, by the norm; both programs compute in bfloat16."""


def timed(fn: Callable[..., Any], outer: Callable[[Any], Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Times `outer(fn)` and `outer(fuse(fn))` in turns.

    Returns:
        For "before" and "after": the sum of a call's kernel times, the wall clock of a call among several in flight,
        both in microseconds, and the number of kernels. "error": the largest difference of an output by its norm.
    """
    programs = {"before": outer(fn), "after": outer(fuse(fn))}
    compiled = compile_all({name: (program, arguments, {}) for name, program in programs.items()})
    for name, each in compiled.items():
        if isinstance(each, str):
            raise RuntimeError(f"{name}: {each}")
    results = [jax.tree.leaves(each(*arguments)) for each in compiled.values()]
    error = max(float(difference(a, b)) for a, b in zip(*results, strict=True))
    if not error < TOLERANCE:
        raise ArithmeticError(f"results differ by {error:.3g} of the norm")
    del results
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
    return {**times, "error": float(np.format_float_scientific(error, 2))}


@jax.jit
def difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the norm of the difference over the norm of `b`, 0 for integers; arrays of one shape."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.zeros(())
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm((a - b).ravel()) / (jnp.linalg.norm(b.ravel()) + 1e-30)
