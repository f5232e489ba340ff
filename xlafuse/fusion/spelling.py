"""A way to write an operation: a function that `fuse` traces to a pattern, and which values it may have computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.fusion.binding import Binding
from xlafuse.fusion.graph import Value


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Arguments of an operation whose result a value may be.

    order: the axis of the operation's result that each axis of the value is. static: further arguments of the spelling.
    """

    arrays: Mapping[str, jax.ShapeDtypeStruct]
    order: tuple[int, ...]
    static: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Spelling:
    """One way to write an operation, or a part of one.

    function: computes it of the arrays, the unknown numbers and the static arguments, by name.
    propose: yields the arguments that may have made a value. The search calls it for values of the primitives `roots`
        that are computed by all of the primitives `needs` (see `terms.primitives_before`).
    unknowns: the numbers that stand for any others while the function is traced.
    floating: arrays that may come in any floating dtype. broadcasting: arrays that need not have all axes.
    objection: returns why the arguments and the numbers found, by name, are refused; "" where they are not.
    arguments: makes the call's options of the static arguments and the numbers found.
    refine: changes the arrays found, as values of the program, and the options; or returns why these are refused.
    prepare: changes the arrays before the call.
    negated: whether the function computes the negative of the operation.
    pieces: returns, for the length of the last axis, the (offset, stride) of each piece that the function returns.
    further: the number of results after those.
    changed: the arrays whose equations are the site's alone; those of others, such as masks, a table of cosines or
        indices, may serve several sites. Empty: all are.
    """

    operation: str
    function: Callable[..., Any]
    propose: Callable[[Value], Iterator[Proposal]]
    roots: frozenset[str]
    needs: frozenset[str] = frozenset()
    unknowns: Mapping[str, float] = field(default_factory=dict)
    floating: frozenset[str] = frozenset()
    broadcasting: frozenset[str] = frozenset()
    objection: Callable[[Mapping[str, Any]], str] = lambda given: ""
    arguments: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: given
    refine: Callable[[dict[str, Binding], dict[str, Any]], tuple[dict[str, Binding], dict[str, Any]] | str] | None = (
        None
    )
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    negated: bool = False
    pieces: Callable[[int], tuple[tuple[int, int], ...]] = lambda length: ((0, 1),)
    further: int = 0
    changed: tuple[str, ...] = ()


def adding(**options: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns what makes a call's options of these, without those that are None, and of what is found."""
    given = {name: each for name, each in options.items() if each is not None}
    return lambda found: {**given, **found}


def struct(like: Value, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Returns an argument's shape, and its dtype: a value's, unless another is given."""
    return jax.ShapeDtypeStruct(shape, like.dtype if dtype is None else dtype)


def wide(dtype: Any) -> Any:
    """Returns the dtype that operations compute in."""
    return jnp.promote_types(dtype, jnp.float32)


def fast_normed(
    value: jax.Array, axes: int | tuple[int, ...], *, epsilon: float, clipped: bool, keepdims: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalizes along axes with the variance as E[x²] - E[x]², as Flax does by default.

    Returns mean and variance, too. clipped: whether the variance is 0 at least. keepdims: whether these keep the axes.
    """
    mean = jnp.mean(value, axis=axes, keepdims=keepdims)
    variance = jnp.mean(jnp.square(value), axis=axes, keepdims=keepdims) - jnp.square(mean)
    variance = jnp.maximum(0.0, variance) if clipped else variance
    return (value - mean) * jax.lax.rsqrt(variance + epsilon), mean, variance


def is_narrow(value: Value) -> bool:
    """Returns whether a value has 16 bits."""
    return value.dtype in (jnp.bfloat16, jnp.float16)


def is_rows(value: Value) -> bool:
    """Returns whether a value can be the result of a row-wise operation."""
    return bool(value.shape) and jnp.issubdtype(value.dtype, jnp.floating) and value.shape[-1] > 1


def same_order(value: Value) -> tuple[int, ...]:
    """Returns the order of a result whose axes are the value's."""
    return tuple(range(len(value.shape)))


ACTIVATION_NEEDS = {
    "gelu_tanh": frozenset(("tanh",)),
    "gelu": frozenset(("erfc",)),
    "quick_gelu": frozenset(("logistic",)),
    "silu": frozenset(("logistic",)),
    "relu": frozenset(("custom_jvp_call",)),
    "relu_squared": frozenset(("custom_jvp_call",)),
}
"""The primitives that tell an activation from others."""
