"""Times the forward pass or training step of a public model on the attached GPU, with and without `xlafuse.fuse`."""

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
    compiled = compile_all({name: (program, arguments, {}) for name, program in programs.items()})
    for name, each in compiled.items():
        if isinstance(each, str):
            raise RuntimeError(f"{name}: {each}")
    results = [checked(each(*arguments)) for each in compiled.values()]
    error = float(difference(*results))
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
    return {"gpu": jax.devices()[0].device_kind, **times, "error": float(np.format_float_scientific(error, 2))}


@jax.jit
def difference(result: Any, expected: Any) -> jax.Array:
    """Returns the norm of the difference of all floating arrays over the norm of what is expected."""

    def norm(*trees: Any) -> jax.Array:
        leaves = zip(*map(jax.tree.leaves, trees), strict=True)
        wide = ([leaf.astype(jnp.float32) for leaf in each] for each in leaves if is_floating(each[0]))
        return jnp.sqrt(sum(jnp.sum(jnp.square(each[0] - sum(each[1:]))) for each in wide))

    return norm(result, expected) / norm(expected)


def is_floating(array: jax.Array) -> bool:
    """Tells whether an array holds floats."""
    return jnp.issubdtype(array.dtype, jnp.floating)
