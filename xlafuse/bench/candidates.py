"""Calls to time: the function, copies of its arguments, and the check of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import OpSpec, testing
from pallas_kernels.specs import plain
from xlafuse.bench.results import Problem

MESSAGE_LENGTH = 600
_TOLERANCE = 2e-2
"""Of a result's norm: guards against timing nonsense; the tests hold the exact rule."""


def callable_of(op: OpSpec, phase: str, implementation: str | None) -> Callable[..., Any]:
    """What is timed: a function of `inputs_of` a call, giving a tuple.

    phase: "forward", "backward", as it runs where the forward pass has saved what it needs (of a named implementation),
        or "grad", the outputs and the gradients of the differentiable arguments.
    """

    def forward(arguments):
        return tuple(testing.forward(testing.Case(op=op, arguments=arguments, cotangents=()), implementation).values())

    def backward(arguments, cotangents):
        assert implementation is not None
        return tuple(jax.tree.leaves(op.backward(implementation, plain(arguments), cotangents)))

    def grad(arguments, cotangents):
        case = testing.Case(op=op, arguments=arguments, cotangents=cotangents)
        outputs, pull_back = jax.vjp(lambda given: forward({**arguments, **given}), case.differentiable)
        return (*outputs, *jax.tree.leaves(pull_back(cotangents)))

    return {"forward": forward, "backward": backward, "grad": grad}[phase]


def inputs_of(case: testing.Case, phase: str) -> tuple[Any, ...]:
    """Arguments, followed by cotangents where the phase takes them."""
    return (case.arguments,) if phase == "forward" else (case.arguments, case.cotangents)


def copies(case: testing.Case, count: int) -> list[testing.Case]:
    """The case and copies with memory of their own: drawing new ones would take longer than timing them."""

    def copy(tree):
        return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)

    others = (replace(case, arguments=copy(case.arguments), cotangents=copy(case.cotangents)) for _ in range(1, count))
    return [case, *others]


def problem_of(name: str, error: Exception) -> Problem:
    """The record of a candidate that failed, or cannot run here."""
    return Problem(
        candidate=name,
        message=f"{type(error).__name__}: {str(error)[:MESSAGE_LENGTH]}",
        kind="unsupported" if isinstance(error, NotImplementedError | ImportError) else "failed",
    )


def check_close(
    result: Sequence[jax.Array], baseline: Sequence[jax.Array], *, of: str = "XLA", smallest: float = 0.0
) -> None:
    """Compares norms of the differences, as far as outputs correspond.

    Args:
        of: whose results the baseline is, for the message.
        smallest: of the largest root mean square among the baseline's arrays. One below is held to that, since it is
            nothing but rounding: the gradient of a query that sees one key.

    Raises:
        AssertionError: an output is off by more than 2 % of its norm, or not a number.
    """
    if len(result) != len(baseline):
        return
    is_float = [jnp.issubdtype(array.dtype, jnp.floating) for array in baseline]
    sizes = [float(_root_mean_square(array)) for array in baseline] if smallest else []
    least = smallest * max((size for size, known in zip(sizes, is_float, strict=False) if known), default=0.0)
    for i, (got, expected) in enumerate(zip(result, baseline, strict=True)):
        if not is_float[i]:
            continue
        error = float(_relative_error(jnp.asarray(got), expected, least))
        if not error < _TOLERANCE:
            raise AssertionError(f"output {i} is off by {error:.3g} of its norm from {of}'s")


@jax.jit
def _root_mean_square(array: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(array.astype(jnp.float32))))


@jax.jit
def _relative_error(got: jax.Array, expected: jax.Array, least: float) -> jax.Array:
    # Compiled, so that float32 copies of large arrays need no memory.
    got, expected = got.reshape(expected.shape).astype(jnp.float32), expected.astype(jnp.float32)
    norm = jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(expected))), least * jnp.sqrt(expected.size))
    return jnp.sqrt(jnp.sum(jnp.square(got - expected))) / (norm + 1e-30)
