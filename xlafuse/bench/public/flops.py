"""Counts the FLOPs of a program's matrix products and convolutions, before XLA changes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def product_flops(function: Callable[..., Any], *arguments: Any) -> int:
    """Counts the products of a function of arrays or shapes, those of masked scores and of recomputation included."""
    return _of_jaxpr(jax.make_jaxpr(function)(*arguments).jaxpr)


def _of_jaxpr(jaxpr: core.Jaxpr) -> int:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        taken = math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * equation.outvars[0].aval.size * taken // math.prod(params["lhs_dilation"])  # without its zeros
    if name in ("dot_general", "ragged_dot_general"):
        numbers = params.get("ragged_dot_dimension_numbers")
        (contracted, _), _ = params["dimension_numbers"] if numbers is None else numbers.dot_dimension_numbers
        lengths = equation.invars[0].aval.shape
        flops = 2 * equation.outvars[0].aval.size * math.prod(lengths[axis] for axis in contracted)
        if numbers is not None and set(numbers.lhs_ragged_dimensions) & set(contracted):  # each group sums its own rows
            return flops // equation.invars[2].aval.size
        return flops
    inner = [_of_jaxpr(each) for each in core.jaxprs_in_params(params)]
    if name == "cond":
        return max(inner)
    return sum(inner) * (params["length"] if name == "scan" else 1)  # a `while`: as if it ran once
