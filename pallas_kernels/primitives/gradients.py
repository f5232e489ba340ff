"""Gradients of several weights that multiply one input, and of a launch that computes what others do apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax


def weight_gradients(x: jax.Array, cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Computes the weight gradient `x.T @ d` of each cotangent d as a separate matrix product.

    x: (rows, features); d: (rows, outputs).

    XLA's dot merger makes one product of several that share an operand if one of them is small. It would copy the
    cotangents to one array, and the gradients from the product's result: 0.3 GB for query, key and value of llama3-8b
    at 8192 rows. A barrier hides from it that x is shared, and costs no launch.
    """
    hidden = (lax.optimization_barrier((x, d)) for d in cotangents)
    return tuple(own.T @ d for own, d in hidden)


def differentiated_as(apart: Callable[..., Any], together: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `together` with the gradient of `apart`, which computes the same. Both take arrays, in trees."""
    function = jax.custom_vjp(together)
    function.defvjp(partial(jax.vjp, apart), lambda pullback, cotangents: pullback(cotangents))
    return function
