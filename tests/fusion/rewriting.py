"""A program beside its rewritten form, whose operations all run by their XLA references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr  # pyright: ignore[reportAttributeAccessIssue]

from xlafuse.fusion.evaluate import evaluate
from xlafuse.fusion.plan import make_plan
from xlafuse.fusion.sites import spellings
from xlafuse.numerics import judge


def normal(shape, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    """Of mean 0 and deviation 1."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def exactly(fn: Callable[..., Any], *arguments: Any) -> Any:
    """What `fn` gives in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, arguments
        )
        return jax.device_get(fn(*jax.tree.map(jnp.asarray, wide)))


def checked(fn: Callable[..., Any], *arguments: jax.Array) -> list[str]:
    """The operations that a program becomes, whose results are compared with the program's.

    Raises:
        AssertionError: a result's error is more than twice the program's own, plus rounding; or an operation that is
            said to be taken is not computed.
    """
    closed = jax.make_jaxpr(lambda *own: jax.tree.leaves(fn(*own)))(*arguments)
    plan = make_plan(closed.jaxpr, spellings())
    taken = [site.operation for each in plan.walk() for site in each.sites]
    if taken:
        computed: dict[Any, str] = {}
        ours = evaluate(plan, [*closed.consts, *arguments], computed.setdefault, implementation="xla")
        assert len(computed) == len(taken), f"of {taken} only {[site.operation for site in computed]} are computed"
        plain = eval_jaxpr(closed.jaxpr, closed.consts, *arguments)
        exact = exactly(lambda *own: jax.tree.leaves(fn(*own)), *arguments)
        ours, plain, exact = _finite(ours, plain, exact)
        error, baseline, passed = judge(ours, plain, exact)
        assert passed, f"{taken}: error {error:.3g}, of the plain program {baseline:.3g}"
    return taken


def _finite(ours: Any, plain: Any, exact: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """The results with zeros where the program has none that are finite; there the rewritten one must have the same."""
    found: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for one, other, reference in zip(ours, plain, exact, strict=True):
        is_finite = np.isfinite(np.asarray(other, np.float64))
        places = np.asarray(one, np.float64)[~is_finite], np.asarray(other, np.float64)[~is_finite]
        np.testing.assert_array_equal(*places)
        for results, each in zip(found, (one, other, reference), strict=True):
            results.append(jnp.where(is_finite, each, 0) if results is not found[2] else np.where(is_finite, each, 0))
    return found
