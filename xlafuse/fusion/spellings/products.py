"""Matrix products with what follows them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ops.gated_linear.reference import gated_linear_reference
from pallas_kernels.ops.linear.reference import linear_reference
from pallas_kernels.primitives.activations import ACTIVATIONS
from xlafuse.fusion.graph import LAYOUTS, Equation, Value, before
from xlafuse.fusion.spelling import ACTIVATION_NEEDS, Proposal, Spelling, adding, is_narrow, struct
from xlafuse.fusion.terms import ELEMENTWISE

_THROUGH = ELEMENTWISE | LAYOUTS | {"add", "sub", "mul", "square", "integer_pow", "custom_jvp_call"}
_REACH = 24
_ADDED = frozenset(("add", "convert_element_type"))
"""What a sum with a bias or residual ends with."""
_ACTIVATED = frozenset(("mul", "convert_element_type", "custom_jvp_call", "square", "integer_pow"))
"""What activations end with."""


@functools.lru_cache(maxsize=4096)
def products_before(value: Value) -> tuple[Equation, ...]:
    """Returns the matrix products that a value is computed from by elements alone, the nearest first."""
    found = before(value, _THROUGH, _REACH)
    return tuple(each.equation for each in found if each.primitive == "dot_general" and each.equation is not None)


def product_before(value: Value) -> Equation | None:
    """Returns the nearest of `products_before`."""
    return next(iter(products_before(value)), None)


def depth_of(product: Equation) -> int:
    """Returns how many elements a product sums."""
    contracted, _ = product.params["dimension_numbers"]
    return math.prod(product.inputs[0].shape[axis] for axis in contracted[0])


def _free_sizes(product: Equation) -> tuple[int, ...]:
    """Returns how many rows and columns a product without batches has, or columns and rows."""
    contracted, _ = product.params["dimension_numbers"]
    operands = zip(product.inputs, contracted, strict=True)
    return tuple(
        math.prod(size for axis, size in enumerate(operand.shape) if axis not in axes) for operand, axes in operands
    )


def layouts(value: Value) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Yields the rows and columns that a product may have, and the order of its axes in the value."""
    shape, rank = value.shape, len(value.shape)
    if rank >= 2:
        yield shape[:-1], shape[-1], tuple(range(rank))
        yield shape[1:], shape[0], (rank - 1, *range(rank - 1))
    if rank >= 3:
        yield shape[:-2], math.prod(shape[-2:]), tuple(range(rank - 1))


def _products(
    value: Value,
    weights: tuple[str, ...],
    *,
    biases: tuple[str, ...] = (),
    residual: bool = False,
    wide: bool = False,
    in_16_bits: bool = True,
) -> Iterator[Proposal]:
    """Proposes the arguments of a product in 16 bits, or in any floating dtype, which `_objection` then refuses."""
    if not is_narrow(value) and (in_16_bits or not jnp.issubdtype(value.dtype, jnp.inexact)):
        return
    equation = product_before(value)
    if equation is None or equation.params["dimension_numbers"][1] != ((), ()):
        return
    depth, free = depth_of(equation), _free_sizes(equation)
    is_whole = math.prod(free) == math.prod(value.shape)
    for rows, columns, order in layouts(value):
        if not rows or (math.prod(rows) == 1 and len(rows) > 1) or (is_whole and columns not in free):
            continue
        arrays = {"x": struct(value, *rows, depth), **dict.fromkeys(weights, struct(value, depth, columns))}
        arrays |= dict.fromkeys(biases, struct(value, columns, dtype=jnp.float32 if wide else None))
        arrays |= {"residual": struct(value, *rows, columns)} if residual else {}
        yield Proposal(arrays=arrays, order=order)


def _objection(given: Mapping[str, Any]) -> str:
    if given["x"].dtype.itemsize == 2:
        return ""
    return "its product is not in 16 bits, and the kernels multiply bfloat16 and float16 alone; cast x and w to one"


def _narrow(x: jax.Array, w: jax.Array, *, bias: Any = None, activation: str | None = None, residual: Any = None):
    """Computes `linear` with each step in 16 bits."""
    y = x @ w
    y = y if bias is None else y + bias
    y = y if activation is None else ACTIVATIONS[activation].reference(y)
    return y if residual is None else y + residual


def _narrow_gate(
    x: jax.Array, w_gate: jax.Array, w_up: jax.Array, *, bias_gate: Any = None, bias_up: Any = None, activation: str
) -> jax.Array:
    gate, up = _narrow(x, w_gate, bias=bias_gate, activation=activation), _narrow(x, w_up, bias=bias_up)
    return gate * up


def _needs(activation: str | None) -> frozenset[str]:
    return frozenset(("dot_general",)) | (ACTIVATION_NEEDS[activation] if activation else frozenset())


def _linears() -> Iterator[Spelling]:
    for biases, residual, activation in itertools.product((("bias",), ()), (True, False), (*ACTIVATIONS, None)):
        is_plain = not (biases or residual or activation)
        roots = _ACTIVATED if activation and not residual else _ADDED
        for function, wide in ((_narrow, False), (linear_reference, True)):
            if is_plain and wide:
                continue
            yield Spelling(
                operation="linear",
                function=functools.partial(function, activation=activation),
                propose=functools.partial(
                    _products, weights=("w",), biases=biases, residual=residual, wide=wide, in_16_bits=wide or is_plain
                ),
                roots=frozenset(("dot_general",)) if is_plain else roots,
                needs=_needs(activation),
                arguments=adding(activation=activation),
                floating=frozenset(("bias",)),
                objection=_objection,
            )


_GATED = ("w_gate", "w_up")


def _gated() -> Iterator[Spelling]:
    for activation, biases in itertools.product(ACTIVATIONS, (("bias_gate", "bias_up"), ())):
        for function, wide in ((_narrow_gate, False), (gated_linear_reference, True)):
            yield Spelling(
                operation="gated_linear",
                function=functools.partial(function, activation=activation),
                propose=functools.partial(_products, weights=_GATED, biases=biases, wide=wide, in_16_bits=wide),
                roots=frozenset(("mul", "convert_element_type")),
                needs=_needs(activation),
                arguments=adding(activation=activation),
                floating=frozenset(biases),
                objection=_objection,
            )


SPELLINGS: tuple[Spelling, ...] = (*_gated(), *_linears())
