"""The bounds in a mask's definition: a band of diagonals and segments, whose tiles kernels skip, and what is left."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.fusion.binding import Binding, bind
from xlafuse.fusion.graph import Value
from xlafuse.fusion.indices import Index, Indices, variables
from xlafuse.fusion.layouts import Ref, number_of, operand, peel, truth

_MOST_PARTS = 3
MASKS = tuple(name + end for name in ("mask", "hiding") for end in ("", *map(str, range(2, _MOST_PARTS + 1))))
"""The names of parts of a mask: where they are True, keys are seen, or hidden."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """Query i sees keys j with i - left <= j <= i + right; None: no bound."""

    left: int | None = None
    right: int | None = None

    def __and__(self, other: Band) -> Band:
        sides = ((self.left, other.left), (self.right, other.right))
        left, right = (min((each for each in pair if each is not None), default=None) for pair in sides)
        return Band(left=left, right=right)

    @property
    def has_own_place(self) -> bool:
        """Returns whether a query sees the key at its own place, as `attention` has it."""
        return all(side is None or side >= 0 for side in (self.left, self.right))


def bounded(arrays: Mapping[str, Binding]) -> tuple[dict[str, Binding], Band, bool]:
    """Takes the bounds out of the masks of attention.

    Returns:
        The arrays, with "segments", or "own_segments" and "other_segments", and with what is left of the masks under
        names of `MASKS`, if there are any bounds; the band; and whether nothing is left of the masks.
    """
    band, segments, rest = Band(), {}, {}
    masks = {name: binding for name, binding in arrays.items() if name in MASKS}
    for name, mask in masks.items():
        if (place := place_of(mask)) is None:
            return dict(arrays), Band(), False
        found, indices = place
        for part, is_hiding in conditions(found, is_hiding=name.startswith("hiding")):
            own_band = band_of(part, is_hiding, indices[2], indices[3])
            if own_band is not None and own_band.has_own_place:
                band &= own_band
            elif not segments and (own := _segments(part, is_hiding, mask.shape, indices)):
                segments = own
            elif (binding := bound(part, mask.shape, indices)) is not None and len(rest) < _MOST_PARTS:
                rest[("hiding" if is_hiding else "mask") + (str(len(rest) + 1) if rest else "")] = binding
            else:
                return dict(arrays), Band(), False
    if band == Band() and not segments:
        return dict(arrays), band, False
    others = {name: binding for name, binding in arrays.items() if name not in masks}
    return {**others, **segments, **rest}, band, not rest


def place_of(binding: Binding) -> tuple[Ref, Indices] | None:
    """Returns the element of a mask's value, and the argument's indices; None where an axis of it is several."""
    indices = variables(binding.shape)
    own = [axis for axis, size in enumerate(binding.shape) if size != 1 and axis not in binding.missing]
    if len(own) != len(binding.parts):
        return None
    of_parts = {part: indices[axis] for part, axis in zip(binding.order, own, strict=True)}
    parts = iter(range(len(binding.parts)))
    found = []
    for start, step, size in binding.places:
        if not size:
            found.append(Index((), start))
            continue
        index = of_parts[next(parts)]
        if index.size != size:
            return None
        found.append(Index(index.digits, start, step))
    return Ref(binding.value, tuple(found)), indices


def conditions(ref: Ref, *, is_hiding: bool = False) -> Iterator[tuple[Ref, bool]]:
    """Yields the conditions that a mask joins by "and", each with whether it is negated. is_hiding: of the mask."""
    ref = peel(ref)
    match ref.value.primitive:
        case "not":
            yield from conditions(operand(ref, 0), is_hiding=not is_hiding)
        case "and" if not is_hiding:
            yield from conditions(operand(ref, 0))
            yield from conditions(operand(ref, 1))
        case "or" if is_hiding:
            yield from conditions(operand(ref, 0), is_hiding=True)
            yield from conditions(operand(ref, 1), is_hiding=True)
        case "convert_element_type" if (inner := _before_casts(ref)).value.dtype == jnp.bool_:
            yield from conditions(inner, is_hiding=is_hiding)
        case "eq" if (chosen := truth(ref, ref.value.equation)) is not None:
            yield from conditions(chosen, is_hiding=not is_hiding)
        case "select_n" if _is_false(operand(ref, 1)) and not is_hiding:
            yield from conditions(operand(ref, 0))
            yield from conditions(operand(ref, 2))
        case "select_n" | "ne" | "gt" if (chosen := _choice_of_nothing(ref)) is not None:
            yield from conditions(chosen, is_hiding=not is_hiding)
        case _:
            yield ref, is_hiding


def _before_casts(ref: Ref) -> Ref:
    while ref.value.primitive == "convert_element_type":
        ref = peel(operand(ref, 0))
    return ref


def _is_false(ref: Ref) -> bool:
    return ref.value.dtype == jnp.bool_ and number_of(ref) is not None and not number_of(ref)


def _choice_of_nothing(ref: Ref) -> Ref | None:
    """Returns what chooses 0 where it is True, and a number above 0 elsewhere, as in `jnp.triu`; None for others."""
    if ref.value.dtype == jnp.bool_ and ref.value.primitive in ("ne", "gt"):
        if number_of(operand(ref, 1)) != 0:
            return None
        ref = _before_casts(peel(operand(ref, 0)))
    if ref.value.primitive != "select_n":
        return None
    off, on = (number_of(operand(ref, place)) for place in (1, 2))
    return operand(ref, 0) if on is not None and off is not None and on == 0 < off else None


_OPPOSITES = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def comparison(ref: Ref, is_hiding: bool) -> tuple[Ref, Ref, bool] | None:
    """Splits a comparison, or its opposite, into its smaller side, its larger side, and whether it is strict."""
    name = _OPPOSITES.get(ref.value.primitive)
    if name is None:
        return None
    name = name if is_hiding else ref.value.primitive
    sides = operand(ref, 0), operand(ref, 1)
    less, more = sides[::-1] if name in ("gt", "ge") else sides
    return less, more, name in ("lt", "gt")


def band_of(ref: Ref, is_hiding: bool, query: Index, key: Index) -> Band | None:
    """Returns the band that a comparison of the places of queries and keys is; None for anything else."""
    if (sides := comparison(ref, is_hiding)) is None:
        return None
    less, more, is_strict = sides
    end = places(more, query, key)
    starts = [places(less, query, key)]
    inner = peel(less)
    if inner.value.primitive == "abs":
        own = places(operand(inner, 0), query, key)
        starts = [own, None if own is None else tuple(-each for each in own)]
    band = Band()
    for start in starts:
        if start is None or end is None:
            return None
        # Of integers, start < end is start - end + 1 <= 0.
        of_query, of_key, rest = (a - b for a, b in zip(start, end, strict=True))
        rest += is_strict
        if (of_query, of_key) == (1, -1):
            band &= Band(left=-rest)
        elif (of_query, of_key) == (-1, 1):
            band &= Band(right=-rest)
        else:
            return None
    return band


def places(ref: Ref, query: Index, key: Index) -> tuple[int, int, int] | None:
    """Returns (a, b, c) of an element that is the integer a * query + b * key + c; None for anything else."""
    ref = peel(ref)
    if ref.value.dtype.itemsize < 4 or not jnp.issubdtype(ref.value.dtype, jnp.number):
        return None
    if (number := number_of(ref)) is not None:
        return (0, 0, int(number)) if number == int(number) else None
    parts: list[tuple[int, int, int] | None]
    match ref.value.primitive:
        case "iota":
            assert ref.value.equation is not None
            index = ref.indices[ref.value.equation.params["dimension"]]
            if index.digits not in ((), query.digits, key.digits):
                return None
            step = index.step if index.digits else 0
            return step * (index.digits == query.digits), step * (index.digits == key.digits), index.start
        case "convert_element_type" if jnp.issubdtype(operand(ref, 0).value.dtype, jnp.integer):
            return places(operand(ref, 0), query, key)
        case "add" | "sub":
            parts = [places(operand(ref, place), query, key) for place in (0, 1)]
            sign = 1 if ref.value.primitive == "add" else -1
        case "neg":
            parts, sign = [(0, 0, 0), places(operand(ref, 0), query, key)], -1
        case _:
            return None
    first, second = parts
    if first is None or second is None:
        return None
    a, b, c = (one + sign * other for one, other in zip(first, second, strict=True))
    return a, b, c


def _segments(ref: Ref, is_hiding: bool, shape: tuple[int, ...], indices: Indices) -> dict[str, Binding]:
    """Returns the segments of queries and keys where a condition is that they are equal; empty for anything else."""
    if ref.value.primitive != ("ne" if is_hiding else "eq"):
        return {}
    sides = [peel(operand(ref, place)) for place in (0, 1)]
    if not all(jnp.issubdtype(each.value.dtype, jnp.integer) for each in sides):
        return {}
    for own, other in (sides, sides[::-1]):
        found = [
            bound(side, (shape[0], shape[axis]), (indices[0], indices[axis])) for side, axis in ((own, 2), (other, 3))
        ]
        first, second = found
        if first is not None and second is not None and 1 not in (*first.missing, *second.missing):
            return {"segments": first} if first == second else {"own_segments": first, "other_segments": second}
    return {}


def bound(ref: Ref, shape: tuple[int, ...], indices: Indices) -> Binding | None:
    """Binds an array of a shape, with an index for each axis, to the value of an element."""
    wanted = Ref(Value(jax.ShapeDtypeStruct(shape, ref.value.dtype)), indices)
    names = {variable: variable for index in indices for variable, _, _ in index.digits}
    return bind(wanted, ref, names)


def joined(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the operation's mask and segments of the arrays that `bounded` returns."""
    made = {}
    masks = [~each if name.startswith("hiding") else each for name, each in arrays.items() if name in MASKS]
    if masks:
        with jax.numpy_rank_promotion("allow"):
            made["mask"] = functools.reduce(operator.and_, masks)
    if "segments" in arrays:
        made["segment_ids"] = arrays["segments"]
    if "own_segments" in arrays:
        made["segment_ids"] = arrays["own_segments"], arrays["other_segments"]
    return made
