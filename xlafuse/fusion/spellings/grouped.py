"""Products of groups of rows, `lax.ragged_dot`, with what follows them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.activations import ACTIVATIONS
from xlafuse.fusion.graph import Value, before, build
from xlafuse.fusion.match import Matcher, Pattern
from xlafuse.fusion.spelling import ACTIVATION_NEEDS, Proposal, Spelling, adding, is_narrow, same_order, struct, wide
from xlafuse.fusion.terms import BY_ELEMENT

PRIMITIVE = "ragged_dot_general"
_REACH = 24

OfRows = Callable[[jax.Array, jax.Array, int], jax.Array]
"""Returns each row's own bias, of the biases (groups, outputs), the groups' sizes and the number of rows."""

_TRANSPOSED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def _repeated(bias: jax.Array, group_sizes: jax.Array, rows: int) -> jax.Array:
    return jnp.repeat(bias, group_sizes, axis=0, total_repeat_length=rows)


def _indexed(bias: jax.Array, group_sizes: jax.Array, rows: int) -> jax.Array:
    return bias[jnp.repeat(jnp.arange(bias.shape[0]), group_sizes, total_repeat_length=rows)]


_BIASES: tuple[OfRows | None, ...] = (None, _repeated, _indexed)


def _product(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, bias: Any, *, is_wide: bool, transpose=False, of_rows=_repeated
) -> jax.Array:
    y = lax.ragged_dot_general(x, w, group_sizes, _TRANSPOSED) if transpose else lax.ragged_dot(x, w, group_sizes)
    y = y.astype(wide(y.dtype)) if is_wide else y
    return y if bias is None else y + of_rows(bias, group_sizes, x.shape[0]).astype(y.dtype)


def _linear(x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, bias: Any = None, activation: Any, **how: Any):
    y = _product(x, w, group_sizes, bias, **how)
    return (ACTIVATIONS[activation].reference(y) if activation else y).astype(x.dtype)


def _gated(
    x: jax.Array, w_gate: Any, w_up: Any, group_sizes: Any, *, bias_gate=None, bias_up=None, activation: str, **how: Any
) -> jax.Array:
    gate, up = (_product(x, w, group_sizes, bias, **how) for w, bias in ((w_gate, bias_gate), (w_up, bias_up)))
    return (ACTIVATIONS[activation].reference(gate) * up).astype(x.dtype)


def _products(
    value: Value, *, weights: tuple[str, ...], biases: tuple[str, ...], transpose: bool
) -> Iterator[Proposal]:
    """Proposes the arguments of the nearest product of groups in 16 bits."""
    near = tuple(before(value, BY_ELEMENT, _REACH))
    products = (each.equation for each in near if each.primitive == PRIMITIVE)
    if not is_narrow(value) or (product := next(products, None)) is None:
        return
    x, w, sizes = product.inputs
    features, outputs = x.shape[1:], value.shape[1:]
    expected = (*outputs, *features) if transpose else (*features, *outputs)
    arrays = {"x": x, **dict.fromkeys(weights, w), "group_sizes": sizes}
    if biases:
        tables = (each.equation.inputs[0] for each in near if each.primitive == "gather" and each.equation)
        table = next((each for each in tables if each.shape == (*w.shape[:1], *outputs)), None)
        if table is None or not has_all_rows(sizes, x.shape[0]):
            return
        arrays |= dict.fromkeys(biases, table)
    if len(w.shape) == 3 and w.shape[1:] == expected and value.shape[:1] == x.shape[:1]:
        structs = {name: struct(each, *each.shape) for name, each in arrays.items()}
        yield Proposal(arrays=structs, order=same_order(value))


def has_all_rows(sizes: Value, rows: int) -> bool:
    """Returns whether every row has a group: sizes are `jnp.bincount` of as many groups, chosen by `lax.top_k`.

    The kernels set rows of no group to zero. `jnp.repeat` gives them the last group's bias.
    """
    values = before(sizes, BY_ELEMENT | {"scatter-add"}, _REACH)
    chosen = next((each for each in values if each.primitive == "top_k"), None)
    if chosen is None or chosen.equation is None or math.prod(chosen.shape) != rows:
        return False
    (scores,), groups = chosen.equation.inputs, sizes.shape[0]
    is_known = scores.shape[-1] <= groups and chosen.shape[:-1] == scores.shape[:-1]
    return is_known and Matcher(_counts(scores.shape, scores.dtype, chosen.shape[-1], groups)).first(sizes) is not None


@lru_cache
def _counts(shape: tuple[int, ...], dtype: Any, chosen: int, groups: int) -> Pattern:
    """Traces how many rows of scores chose each group."""

    def counts(scores: jax.Array) -> jax.Array:
        return jnp.bincount(lax.top_k(scores, chosen)[1].reshape(-1), length=groups)

    closed = jax.make_jaxpr(counts)(jax.ShapeDtypeStruct(shape, dtype))
    return Pattern("jnp.bincount", build(closed.jaxpr), ("scores",), {})


_CALLS = (
    ("grouped_gated_linear", _gated, ("w_gate", "w_up"), {}),
    ("grouped_linear", _linear, ("w",), {"transpose": False}),
    ("grouped_linear", _linear, ("w",), {"transpose": True}),
)


def _spellings() -> Iterator[Spelling]:
    # Every activation is zero at zero, as rows of no group are.
    for (operation, function, weights, options), of_rows, activation in itertools.product(
        _CALLS, _BIASES, (*ACTIVATIONS, None)
    ):
        if activation is None and not options:
            continue
        given = {name: each for name, each in {**options, "activation": activation}.items() if each}
        biases = tuple(name.replace("w", "bias") for name in weights) if of_rows else ()
        added = {"of_rows": of_rows} if of_rows else {}
        last = "mul" if activation else "add" if of_rows else PRIMITIVE
        for is_wide in (False, True) if activation or of_rows else (False,):
            yield Spelling(
                operation=operation,
                function=partial(function, activation=activation, is_wide=is_wide, **options, **added),
                propose=partial(_products, weights=weights, biases=biases, transpose=options.get("transpose", False)),
                roots=frozenset((last, "convert_element_type", "custom_jvp_call") if last != PRIMITIVE else (last,)),
                needs=frozenset((PRIMITIVE, "gather") if of_rows else (PRIMITIVE,))
                | ACTIVATION_NEEDS.get(activation or "", frozenset()),
                arguments=adding(**given),
                changed=("x", *weights, *biases) if of_rows else (),
            )


SPELLINGS: tuple[Spelling, ...] = tuple(_spellings())
