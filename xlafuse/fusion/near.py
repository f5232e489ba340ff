"""Matches what is an operation but for rounding: the program casts where the pattern does not, or vice versa."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import jax.numpy as jnp

from xlafuse.fusion.binding import equations_between
from xlafuse.fusion.graph import LAYOUTS, Equation, Value, is_free
from xlafuse.fusion.layouts import Ref, operand, peel, peeled
from xlafuse.fusion.match import Difference, Match, Matcher, Pattern
from xlafuse.fusion.terms import expand


def nearest(
    pattern: Pattern, floating: frozenset[str], value: Value, pieces: Sequence[tuple[int, int]]
) -> Match | None:
    """Returns the first way in which a value is the pattern's output but for rounding."""
    match = NearMatcher(pattern, floating).first(value, pieces)
    if match is None or match.arrays.keys() != set(pattern.names):
        return None
    inside = equations_between(value, match.arrays.values())
    return replace(match, differences=match.differences or tuple(_rounding(inside, value)))


class NearMatcher(Matcher):
    """Compares elements with those of one pattern, and notes casts. floating: inputs of any floating dtype."""

    def __init__(self, pattern: Pattern, floating: frozenset[str]):
        super().__init__(pattern)
        self._floating = floating

    def _match(self, wanted: Ref, found: Ref, so_far: Match) -> Iterator[Match]:
        inner = _without_casts(wanted)
        if inner.value not in self._inputs:
            noted = self._in_dtype(peel(wanted), peel(found), so_far)
            if noted is None:
                return
            found, so_far = _without_casts(found), noted
        yield from super()._match(inner, found, so_far)

    def _expand(self, kind: str, ref: Ref) -> tuple[list[tuple[Ref, int]], float] | None:
        return expand(kind, _without_casts(ref))

    def _in_dtype(self, wanted: Ref, found: Ref, so_far: Match) -> Match | None:
        own, other = wanted.value.dtype, found.value.dtype
        if not (_is_floating(wanted.value) and _is_floating(found.value)) or own.itemsize == other.itemsize:
            return super()._in_dtype(wanted, found, so_far)
        difference = Difference("rounds" if other.itemsize < own.itemsize else "keeps", found.value)
        return replace(so_far, differences=tuple(dict.fromkeys((*so_far.differences, difference))))

    def _number(self, wanted: float, found: float, place: Ref, at: Ref, so_far: Match, kind: str = "") -> Match | None:
        coarser = min(place, at, key=lambda ref: ref.value.dtype.itemsize)
        return super()._number(wanted, found, coarser, at, so_far, kind)

    def _bind(self, wanted: Ref, given: Ref, so_far: Match) -> Iterator[Match]:
        stages = [given]
        while (inner := _operand_of_cast(peel(stages[-1]))) is not None:
            stages.append(inner)
        fitting = [ref for ref in stages if peel(ref).value.dtype == wanted.value.dtype]
        if fitting:
            yield from super()._bind(wanted, fitting[-1], so_far)
            return
        last, is_any = peel(stages[-1]), self._inputs[wanted.value] in self._floating
        if is_any and _is_floating(last.value):
            yield from self._bound(wanted, peeled(stages[-1]), so_far)
        elif wanted.value.dtype.itemsize >= last.value.dtype.itemsize:
            # The operation would be called with arrays that have more bits than the program's.
            super()._in_dtype(wanted, last, so_far)
        elif (noted := self._in_dtype(wanted, last, so_far)) is not None:
            yield from self._bound(wanted, peeled(stages[-1]), noted)


def _is_floating(value: Value) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize >= 2


def _operand_of_cast(ref: Ref) -> Ref | None:
    """Returns the element before a cast from one floating dtype to another; None for anything else."""
    if ref.value.primitive != "convert_element_type" or not _is_floating(ref.value):
        return None
    inner = operand(ref, 0)
    return inner if _is_floating(inner.value) else None


def _without_casts(ref: Ref) -> Ref:
    """Returns an element behind its layouts and its casts from one floating dtype to another."""
    ref = peel(ref)
    while (inner := _operand_of_cast(ref)) is not None:
        ref = peel(inner)
    return ref


def computes_wide(pattern: Pattern) -> bool:
    """Returns whether a pattern computes everything but matrix products in at least 32 bits."""
    return not any(
        _is_floating(value) and value.dtype.itemsize < 4 and value.primitive != "dot_general"
        for equation in pattern.graph.equations
        if equation.primitive not in LAYOUTS
        for value in equation.outputs
    )


def _rounding(equations: Collection[Equation], result: Value) -> Iterator[Difference]:
    """Yields the values that are cast to fewer bits on the way to a result, other than for it alone."""
    for equation in sorted(equations, key=lambda each: each.index):
        value = equation.outputs[0]
        if equation.primitive == "convert_element_type" and value is not result and not equation.is_constant:
            inner = equation.inputs[0]
            is_narrower = _is_floating(value) and _is_floating(inner) and value.dtype.itemsize < inner.dtype.itemsize
            if is_narrower and not all(map(is_free, value.users)):
                yield Difference("rounds", value)
