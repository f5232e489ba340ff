"""First derivatives in reverse mode: of some arguments, and as the limit of operations. All others raise everywhere.

A kernel has only a backward pass, while XLA could differentiate its own program again or in forward mode. Code that
relied on that would run on a laptop and fail on a GPU, so both refuse it. `implementation="xla"` has all derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def with_pullback(function: Callable[..., Any], wanted: Sequence[bool], *values: Any) -> Any:
    """Returns the function's result and its pullback to the wanted arguments."""

    def of_wanted(*own: Any) -> Any:
        given = iter(own)
        return function(*(next(given) if is_wanted else value for value, is_wanted in zip(values, wanted, strict=True)))

    return jax.vjp(of_wanted, *(value for value, is_wanted in zip(values, wanted, strict=True) if is_wanted))


def with_zeros(cotangents: Any) -> Any:
    """Returns the cotangents of a `jax.custom_vjp` with the zeros that a pullback takes: they have no leaves."""
    is_zero = lambda leaf: isinstance(leaf, SymbolicZero)  # noqa: E731
    return jax.tree.map(lambda leaf: ad.Zero(leaf.aval) if is_zero(leaf) else leaf, cotangents, is_leaf=is_zero)


def first_order(operation: str, arguments: Any) -> Any:
    """Returns the arguments with their traced floating-point arrays differentiable once, in reverse mode."""

    def marked(leaf: Any) -> Any:
        if isinstance(leaf, Tracer) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            return _differentiable_once.bind(leaf, operation=operation)
        return leaf

    return jax.tree.map(marked, arguments)


def _refuse(*_: Any, operation: str) -> Any:
    raise NotImplementedError(
        f"{operation} has first derivatives in reverse mode (jax.grad, jax.vjp). Forward mode (jax.jvp, jax.jacfwd, "
        "jax.linearize) and second derivatives need implementation='xla'."
    )


def _identity(name: str) -> Primitive:
    """Makes a primitive that returns its operand and adds nothing to the program."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, operation: x)
    primitive.def_abstract_eval(lambda x, operation: x)
    mlir.register_lowering(primitive, lambda _, x, operation: [x])
    batching.defvectorized(primitive)
    return primitive


_differentiable_once = _identity("differentiable_once")
_not_differentiable = _identity("not_differentiable")
_tangent = _identity("reverse_mode_tangent")
"""The tangent's primitive. It is only ever transposed: evaluating it means forward mode, and raises."""


def _once_jvp(primals: Any, tangents: Any, *, operation: str) -> Any:
    (x,), (tangent,) = primals, tangents
    return _not_differentiable.bind(x, operation=operation), _tangent.bind(tangent, operation=operation)


def _transpose_tangent(cotangent: Any, _: Any, *, operation: str) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [_not_differentiable.bind(cotangent, operation=operation)]


ad.primitive_jvps[_differentiable_once] = _once_jvp
ad.primitive_jvps[_not_differentiable] = _refuse
ad.primitive_jvps[_tangent] = _refuse
ad.primitive_transposes[_tangent] = _transpose_tangent
_tangent.def_impl(_refuse)
mlir.register_lowering(_tangent, _refuse)
