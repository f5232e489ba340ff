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
from xlafuse.numerics import judge


def normal(shape, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    """Of mean 0 and deviation 1."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def exactly(fn: Callable[..., Any], *arguments: Any) -> Any:
    """What `fn` gives in float64, by one program: its operations one by one take longer to compile."""
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, arguments
        )
        return jax.device_get(jax.jit(lambda *own: fn(*own))(*jax.tree.map(jnp.asarray, wide)))


def checked(fn: Callable[..., Any], *arguments: jax.Array) -> list[str]:
    """The operations that a program becomes, whose results are compared with the program's.

    Of small arrays in 16 bits one may happen to round to nearly the exact result in the program, so that no other
    order of rounding keeps the bound. A program that breaks it is therefore judged with three further sets of numbers.

    Raises:
        AssertionError: a result's error is more than twice the program's own, plus rounding, and with two further sets,
            too; or an operation that is said to be taken is not computed.
    """
    closed = jax.make_jaxpr(lambda *own: jax.tree.leaves(fn(*own)))(*arguments)
    plan = make_plan(closed.jaxpr)
    taken = [site.operation for each in plan.walk() for site in each.sites]

    def judged(*own: jax.Array) -> tuple[float, float, bool]:
        computed: dict[Any, Any] = {}
        ours = evaluate(plan, [*closed.consts, *own], computed.setdefault, implementation="xla")
        assert len(computed) == len(taken), f"of {taken} only {[site.operation for site in computed]} are computed"
        plain = eval_jaxpr(closed.jaxpr, closed.consts, *own)
        exact = exactly(lambda *own: jax.tree.leaves(fn(*own)), *own)
        return judge(*_finite(ours, plain, exact))

    if taken:
        error, baseline, passed = judged(*arguments)
        if not passed:
            others = [judged(*(_shifted(each, places) for each in arguments)) for places in (1, 2, 3)]
            passed = sum(each[2] for each in others) >= 2
        assert passed, f"{taken}: error {error:.3g}, of the plain program {baseline:.3g}"
    return taken


def _shifted(array: jax.Array, places: int) -> jax.Array:
    """The array with its floating numbers moved on by some places."""
    return jnp.roll(array.ravel(), places).reshape(array.shape) if jnp.issubdtype(array.dtype, jnp.floating) else array


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
