"""Rotary position embedding of one array, by cosines and sines that the program has or computes anyhow.

`combine` makes one `rope` of two such arrays that are rotated alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.fusion.graph import Value
from xlafuse.fusion.indices import Index
from xlafuse.fusion.layouts import Ref, element, operand, peel
from xlafuse.fusion.spelling import Proposal, Spelling, is_narrow, wide


def _layouts(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the shapes (batch, tokens, heads, size) that a value may have, and the order of its axes in them."""
    if len(shape) == 3:  # no batch, or one head
        return [((1, *shape), (0, 1, 2, 3)), ((*shape[:2], 1, shape[2]), (0, 1, 2, 3))]
    return [(tuple(shape[axis] for axis in order), order) for order in ((0, 1, 2, 3), (0, 2, 1, 3))]


def _rotated(
    x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool, negates: bool, narrow: bool
) -> tuple[jax.Array, jax.Array]:
    """Rotates by tables of one element a pair, or a column; returns the first and the second of each pair.

    narrow: in x's dtype. negates: adds the product with -second.
    """
    size = x.shape[-1]

    def pairs(array: jax.Array) -> tuple[jax.Array, jax.Array]:
        half, stride = (1, 2) if interleaved else (size // 2, 1)
        first, second = (jax.lax.slice_in_dim(array, at, size - half + at, stride, axis=3) for at in (0, half))
        return first, second

    first, second = pairs(x if narrow else x.astype(wide(x.dtype)))
    tables = cos[:, :, None], sin[:, :, None]
    cosines, sines = (pairs(each) if each.shape[-1] == size else (each, each) for each in tables)
    low = first * cosines[0] + -second * sines[0] if negates else first * cosines[0] - second * sines[0]
    return low.astype(x.dtype), (second * cosines[1] + first * sines[1]).astype(x.dtype)


def _multiplied(x: jax.Array, factors: jax.Array, *, interleaved: bool) -> tuple[jax.Array, jax.Array]:
    """Multiplies pairs, as complex numbers, by factors; returns the real and the imaginary parts."""
    (first, stride), (second, _) = (neighbours if interleaved else halves)(x.shape[-1])
    pairs = [x.astype(wide(x.dtype))[..., start::stride][..., : x.shape[-1] // 2] for start in (first, second)]
    product = jax.lax.complex(*pairs) * factors[:, :, None]
    return product.real.astype(x.dtype), product.imag.astype(x.dtype)


def _parts(arrays: dict[str, Any]) -> dict[str, Any]:
    """Gives a call the cosines and sines of complex factors."""
    factors = arrays.pop("factors")
    return {**arrays, "cos": factors.real, "sin": factors.imag}


def halves(length: int) -> tuple[tuple[int, int], ...]:
    """Returns where the first and the second of pairs are, in halves."""
    return (0, 1), (length // 2, 1)


def neighbours(length: int) -> tuple[tuple[int, int], ...]:
    """Returns where the first and the second of pairs are, side by side."""
    return (0, 2), (1, 2)


def _is_rotated(value: Value, *, narrow: bool, interleaved: bool, negates: bool) -> bool:
    """Returns whether the first of each pair is a sum, or a real part, in the dtype of the rotation."""
    whole = element(value)
    (offset, stride), _ = (neighbours if interleaved else halves)(value.shape[-1])
    (variable, _, size), *_ = whole.indices[-1].digits
    first = Index(((variable, 1, size // 2),), offset, stride)
    ref = peel(Ref(value, (*whole.indices[:-1], first)))
    if ref.value.primitive == "convert_element_type":
        ref = peel(operand(ref, 0))
    ends = ("add",) if negates else ("add", "sub", "real")
    return ref.value.primitive in ends and ref.value.dtype == (value.dtype if narrow else wide(value.dtype))


def _rotations(
    value: Value, *, tables: tuple[str, ...], columns: int, narrow: bool, interleaved: bool, negates: bool
) -> Iterator[Proposal]:
    """Proposes an array that is rotated by tables of `columns` for a pair."""
    if (
        len(value.shape) not in (3, 4)
        or value.shape[-1] % 2
        or value.shape[-1] < 4
        or (narrow and not is_narrow(value))
    ):
        return
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return
    if not _is_rotated(value, narrow=narrow, interleaved=interleaved, negates=negates):
        return
    dtype = value.dtype if narrow else wide(value.dtype)
    dtype = jnp.result_type(dtype, jnp.complex64) if tables == ("factors",) else dtype
    for shape, order in _layouts(value.shape):
        table = jax.ShapeDtypeStruct((*shape[:2], shape[-1] * columns // 2), dtype)
        arrays = {"x": jax.ShapeDtypeStruct(shape, value.dtype), **dict.fromkeys(tables, table)}
        yield Proposal(arrays=arrays, order=order, static={"interleaved": interleaved})


def _spellings() -> Iterator[Spelling]:
    for interleaved in (False, True):
        common: dict[str, Any] = {
            "operation": "rotation",
            "pieces": neighbours if interleaved else halves,
            "changed": ("x",),
        }
        for narrow, negates, columns in itertools.product((False, True), (False, True), (1, 2)):
            form: dict[str, Any] = {"narrow": narrow, "negates": negates}
            tables = {"tables": ("cos", "sin"), "columns": columns, "interleaved": interleaved}
            yield Spelling(
                function=partial(_rotated, **form),
                propose=partial(_rotations, **tables, **form),
                roots=frozenset(("concatenate", "reshape", "convert_element_type", "add")),
                needs=frozenset(("mul", "concatenate")),
                broadcasting=frozenset(("cos", "sin")),
                floating=frozenset(("cos", "sin")),
                **common,
            )
        yield Spelling(
            function=_multiplied,
            propose=partial(
                _rotations, tables=("factors",), columns=1, narrow=False, interleaved=interleaved, negates=False
            ),
            roots=frozenset(("concatenate", "reshape", "convert_element_type")),
            needs=frozenset(("complex", "concatenate")),
            broadcasting=frozenset(("factors",)),
            prepare=_parts,
            **common,
        )


SPELLINGS: tuple[Spelling, ...] = tuple(_spellings())
