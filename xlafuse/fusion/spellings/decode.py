"""Attention of one token over a cache, whose mask says where each sequence ends."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.fusion.binding import Binding
from xlafuse.fusion.graph import Value
from xlafuse.fusion.indices import ZERO, Index, variables
from xlafuse.fusion.layouts import Ref, number
from xlafuse.fusion.spelling import Proposal
from xlafuse.fusion.spellings import attention
from xlafuse.fusion.spellings.attention_forms import OPPOSITES, forms, size_of_heads
from xlafuse.fusion.spellings.attention_masks import (
    MASKS,
    Band,
    band_of,
    bound,
    comparison,
    conditions,
    place_of,
    places,
)
from xlafuse.fusion.spellings.rows import LOWEST

_MOST_ENDS = 3
_KINDS = ("end", "last", "row")
ENDS = tuple(kind + number for kind in _KINDS for number in ("", *map(str, range(2, _MOST_ENDS + 1))))
"""The names of numbers that end a sequence: of its keys, of the last one, and of a row of a causal mask."""
_OTHERS = "its mask may hide other keys than those behind the end of a sequence"


def _decodes(result: Value) -> Iterator[Proposal]:
    """Proposes the arguments where one axis of length 1 is that of queries."""
    if len(result.shape) != 4 or 1 not in result.shape or (roles := attention.roles_of(result, one_query=True)) is None:
        return
    axes, keys, key_heads, weights, product = roles
    batch, queries, heads, size = (result.shape[axis] for axis in axes)
    if heads % key_heads or (own_size := size_of_heads(weights)) != size:
        return
    of_keys = jax.ShapeDtypeStruct((batch, keys, key_heads, size), result.dtype)
    query = jax.ShapeDtypeStruct((batch, queries, heads, own_size), result.dtype)
    masks = {*OPPOSITES, *OPPOSITES.values()} & set(MASKS)
    for form in forms(weights, is_wide=product.dtype.itemsize > result.dtype.itemsize):
        if form.arrays and masks.issuperset(form.arrays) and not (form.sinks or form.drops):
            mask = jax.ShapeDtypeStruct((batch, heads, queries, keys), jnp.bool_)
            arrays = {**dict.fromkeys(form.arrays, mask), "query": query, "key": of_keys, "value": of_keys}
            yield Proposal(arrays=arrays, order=tuple(map(axes.index, range(4))), static={"form": form})


def _with_ends(arrays: dict[str, Binding], options: dict[str, Any]) -> tuple[dict[str, Binding], dict[str, Any]] | str:
    """Puts the ends of sequences in the place of masks."""
    if (hidden := options.pop("mask_value", LOWEST)) > LOWEST:
        return f"hidden scores are {hidden:g}, and only {LOWEST:g} or less has no weight"
    ends: dict[str, Binding] = {}
    for name, mask in arrays.items():
        if name not in MASKS:
            continue
        if (place := place_of(mask)) is None:
            return _OTHERS
        found, (batch, _, _, key) = place
        for part, is_hiding in conditions(found, is_hiding=name.startswith("hiding")):
            if (end := _end(part, is_hiding, key)) is None:
                return _OTHERS
            kind, ref = end
            if ref is not None:
                binding = bound(ref, mask.shape[:1], (batch,))
                names = [each for each in ENDS if each.startswith(kind) and each not in ends]
                if binding is None or not names:
                    return _OTHERS
                ends[names[0]] = binding
    if not ends:
        return "its mask hides no key"
    return {**{name: arrays[name] for name in ("query", "key", "value")}, **ends}, options


def _end(ref: Ref, is_hiding: bool, key: Index) -> tuple[str, Ref | None] | None:
    """Returns the kind and the number of an end that a condition is; no number where it hides no key."""
    if ref.value.primitive == "dynamic_slice":
        return _row(ref, is_hiding, key)
    if (sides := comparison(ref, is_hiding)) is None:
        return None
    less, more, is_strict = sides
    first, second = (places(each, ZERO, key) for each in (less, more))
    if first == (0, 1, 0) and jnp.issubdtype(more.value.dtype, jnp.signedinteger):
        if second is None:
            return ("end" if is_strict else "last"), more
        if second[1] == 0:  # one number in all of an array
            indices = tuple(replace(index, digits=()) for index in more.indices)
            return ("end" if is_strict else "last"), replace(more, indices=indices)
    if first is None or second is None or first[1] != 0 or second[1] != 1:
        return None
    return ("last", None) if first[2] + is_strict <= second[2] else None


def _row(ref: Ref, is_hiding: bool, key: Index) -> tuple[str, Ref | None] | None:
    """Returns the number of the row that is cut out of a causal mask; None for other slices."""
    equation = ref.value.equation
    assert equation is not None
    mask, *starts = equation.inputs
    inner: list[Index] = []
    rows: list[tuple[Value, Index, int]] = []
    for index, start, size in zip(ref.indices, starts, mask.shape, strict=True):
        if number(start) == 0:
            inner.append(index)
        elif not index.digits and index.start == 0 and not start.shape:
            inner.append(variables((size,))[0])
            rows.append((start, inner[-1], size))
        else:
            return None
    if len(rows) != 1 or rows[0][2] < key.size or not jnp.issubdtype(rows[0][0].dtype, jnp.signedinteger):
        return None
    start, row, _ = rows[0]
    bands = [band_of(part, hides, row, key) for part, hides in conditions(Ref(mask, tuple(inner)), is_hiding=is_hiding)]
    return ("row", Ref(start, ())) if bands == [Band(right=0)] else None


def _arguments(arrays: dict[str, Any]) -> dict[str, Any]:
    """Makes the operation's arrays. A token that sees no key averages all values: by a query of zeros that sees all."""
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    keys = key.shape[1]
    lowest = {"end": 0, "last": -1, "row": 0}
    counts = []
    for name, each in arrays.items():
        if name in ENDS:
            kind = name.rstrip("0123456789")
            is_last = kind != "end"
            each = each.astype(jnp.promote_types(each.dtype, jnp.int32))
            counts.append(jnp.clip(each, lowest[kind], keys - is_last).astype(jnp.int32) + is_last)
    lengths = jnp.broadcast_to(functools.reduce(jnp.minimum, counts), query.shape[:1])
    sees_none = lengths == 0
    query = jnp.where(sees_none[:, None, None, None], jnp.zeros_like(query), query)
    return {"query": query, "key_cache": key, "value_cache": value, "lengths": jnp.where(sees_none, keys, lengths)}


SPELLINGS = (
    replace(
        attention.SPELLINGS[0],
        operation="decode_attention",
        propose=_decodes,
        broadcasting=attention.SPELLINGS[0].broadcasting | set(ENDS),
        refine=_with_ends,
        prepare=_arguments,
    ),
)
