"""Matches what nearly is an operation, and names the differences.

Besides the formulas that `match` takes, the program may round where the pattern does not, or the other way round; may
compute further steps between those of the pattern; and may have other numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import jax.numpy as jnp

from xlafuse.fusion.binding import equations_between
from xlafuse.fusion.graph import LAYOUTS, Equation, Value, is_free
from xlafuse.fusion.layouts import Ref, number, operand, peel, peeled
from xlafuse.fusion.match import Difference, Match, Matcher, Pattern
from xlafuse.fusion.terms import ELEMENTWISE, expand

MOST_STEPS = 2
"""The most further steps and other numbers: what differs more is another formula."""
_MOST_CALLS = 3000
"""Ends a search that backtracks without end; what was found took fewer than 1000."""
_STEPS = ELEMENTWISE | {"add", "sub", "mul", "div", "square", "integer_pow", "rsqrt", "custom_jvp_call"}


class _ExhaustedError(Exception):
    """The search took too long."""


def nearest(
    pattern: Pattern, floating: frozenset[str], value: Value, pieces: Sequence[tuple[int, int]], *, steps: int
) -> Match | None:
    """Returns the first way in which a value is the pattern's output with so many further steps at most."""
    matcher = NearMatcher(pattern, floating, steps=steps)
    try:
        match = matcher.first(value, pieces)
    except _ExhaustedError:
        return None
    if match is None or match.arrays.keys() != set(pattern.names):
        return None
    inside = equations_between(value, match.arrays.values())
    passed = (Difference("step", own, place) for own, place in matcher.passed.items() if own.equation in inside)
    found = tuple(dict.fromkeys((*match.differences, *passed))) or tuple(_rounding(inside, value))
    return replace(match, differences=found)


class NearMatcher(Matcher):
    """Compares elements with those of one pattern, and notes differences. floating: inputs of any floating dtype."""

    def __init__(self, pattern: Pattern, floating: frozenset[str], *, steps: int):
        super().__init__(pattern)
        self._floating = floating
        self._steps = steps
        self._calls = 0
        self.passed: dict[Value, int] = {}

    def _match(self, wanted: Ref, found: Ref, so_far: Match) -> Iterator[Match]:
        self._calls += 1
        if self._calls > _MOST_CALLS:
            raise _ExhaustedError
        inner = _without_casts(wanted)
        is_input = inner.value in self._inputs
        if not is_input:
            noted = self._in_dtype(peel(wanted), peel(found), so_far)
            if noted is None:
                return
            found, so_far = _without_casts(found), noted
        yield from super()._match(inner, found, so_far)
        step = _without_casts(found)
        if self._fitted and step.value.primitive in _STEPS:
            yield from self._behind_step(wanted, step, so_far)

    def _behind_step(self, wanted: Ref, found: Ref, so_far: Match) -> Iterator[Match]:
        """Yields the matches of operands of the equation that computes an element."""
        equation = found.value.equation
        if equation is None or found.value.is_imagined or not _is_floating(found.value):
            return
        for place, each in enumerate(equation.inputs[:1] if equation.primitive in ("div", "sub") else equation.inputs):
            if each.shape == found.value.shape and _is_floating(each) and number(each) is None:
                noted = self._noted(Difference("step", found.value, place), so_far)
                if noted is not None:
                    yield from self._match(wanted, operand(found, place), noted)

    def _noted(self, difference: Difference, so_far: Match) -> Match | None:
        """Returns the match with one more difference, unless there are too many."""
        if difference in so_far.differences:
            return so_far
        is_free = difference.kind in ("rounds", "keeps")
        if not is_free and sum(each.kind in ("step", "number") for each in so_far.differences) >= self._steps:
            return None
        return replace(so_far, differences=(*so_far.differences, difference))

    def _expand(self, kind: str, ref: Ref) -> tuple[list[tuple[Ref, int]], float] | None:
        return expand(kind, _without_casts(ref))

    def _expand_found(self, kind: str, ref: Ref) -> tuple[list[tuple[Ref, int]], float] | None:
        """Takes apart what chooses between a product and a number, too, as dropout in a product does."""
        inner = self._expand(kind, ref)
        ref = _without_casts(ref)
        if inner is not None or not self._steps or kind != "product" or not self._fitted:
            return inner
        if ref.value.primitive != "select_n" or ref.value.equation is None or len(ref.value.equation.inputs) != 3:
            return None
        places = [place for place in (1, 2) if number(ref.value.equation.inputs[place]) is None]
        if len(places) != 1:
            return None
        self.passed[ref.value] = places[0]
        return [(operand(ref, places[0]), 1)], 1.0

    def _in_dtype(self, wanted: Ref, found: Ref, so_far: Match) -> Match | None:
        own, other = wanted.value.dtype, found.value.dtype
        if not (_is_floating(wanted.value) and _is_floating(found.value)) or own.itemsize == other.itemsize:
            return super()._in_dtype(wanted, found, so_far)
        return self._noted(Difference("rounds" if other.itemsize < own.itemsize else "keeps", found.value), so_far)

    def _number(self, wanted: float, found: float, place: Ref, at: Ref, so_far: Match, kind: str = "") -> Match | None:
        coarser = min(place, at, key=lambda ref: ref.value.dtype.itemsize)
        fits = super()._number(wanted, found, coarser, at, so_far, kind)
        # The number of a whole result is a step behind the operation, and none inside it.
        is_behind = self._fitted <= 1 and not self.passed
        if fits is not None or is_behind or not _is_floating(place.value):
            return fits
        difference = Difference("number", at.value, place=int(kind == "product"), found=found, wanted=wanted)
        return self._noted(difference, so_far)

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
