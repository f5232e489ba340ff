"""Products of groups of rows, `lax.ragged_dot`, with what follows them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import jax
from jax import lax

from pallas_kernels.ops.gated_activation.reference import gated_activation_reference
from pallas_kernels.primitives.activations import ACTIVATIONS
from xlafuse.fusion.graph import Value, before
from xlafuse.fusion.spelling import ACTIVATION_NEEDS, Proposal, Spelling, is_narrow, same_order, wide
from xlafuse.fusion.terms import BY_ELEMENT

PRIMITIVE = "ragged_dot_general"
_REACH = 24


_TRANSPOSED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def _linear(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, activation: str | None, is_wide: bool, transpose: bool
) -> jax.Array:
    y = lax.ragged_dot_general(x, w, group_sizes, _TRANSPOSED) if transpose else lax.ragged_dot(x, w, group_sizes)
    if activation is None:
        return y
    return ACTIVATIONS[activation].reference(y.astype(wide(y.dtype)) if is_wide else y).astype(x.dtype)


def _gated(
    x: jax.Array, w_gate: jax.Array, w_up: jax.Array, group_sizes: jax.Array, *, activation: str, is_wide: bool
) -> jax.Array:
    gate, up = (lax.ragged_dot(x, w, group_sizes) for w in (w_gate, w_up))
    if is_wide:
        return gated_activation_reference(gate, up, activation=activation)
    return ACTIVATIONS[activation].reference(gate) * up


def _products(value: Value, *, weights: tuple[str, ...], transpose: bool) -> Iterator[Proposal]:
    """Proposes the arguments of the nearest product of groups in 16 bits."""
    products = (each.equation for each in before(value, BY_ELEMENT, _REACH) if each.primitive == PRIMITIVE)
    if not is_narrow(value) or (product := next(products, None)) is None:
        return
    x, w, sizes = product.inputs
    features, outputs = x.shape[1:], value.shape[1:]
    expected = (*outputs, *features) if transpose else (*features, *outputs)
    if len(w.shape) == 3 and w.shape[1:] == expected and value.shape[:1] == x.shape[:1]:
        arrays = {"x": x, **dict.fromkeys(weights, w), "group_sizes": sizes}
        structs = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in arrays.items()}
        yield Proposal(arrays=structs, order=same_order(value))


def _spellings() -> Iterator[Spelling]:
    # Every activation is zero at zero, as rows of no group are.
    gated, plain = ("grouped_gated_linear", _gated, ("w_gate", "w_up")), ("grouped_linear", _linear, ("w",))
    for options, activation in itertools.product(({}, {"transpose": False}, {"transpose": True}), (*ACTIVATIONS, None)):
        operation, function, weights = plain if options else gated
        if activation is None and not options:
            continue
        given = {name: each for name, each in {**options, "activation": activation}.items() if each}
        for is_wide in (False, True) if activation else (False,):
            yield Spelling(
                operation=operation,
                function=partial(function, activation=activation, is_wide=is_wide, **options),
                propose=partial(_products, weights=weights, transpose=bool(options.get("transpose"))),
                roots=frozenset(("mul", "convert_element_type", "custom_jvp_call") if activation else (PRIMITIVE,)),
                needs=frozenset((PRIMITIVE,)) | (ACTIVATION_NEEDS[activation] if activation else frozenset()),
                arguments=partial(_with, given),
            )


def _with(options: dict, given: dict) -> dict:
    return {**given, **options}


SPELLINGS: tuple[Spelling, ...] = tuple(_spellings())
