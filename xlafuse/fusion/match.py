"""Matches a program's formula for an element with a pattern's.

A pattern is an operation's own definition, traced. Its inputs stand for any array, and some of its numbers for any
number. The matcher compares the elements of both from the results down. A match is thus equal in each part of the
formula, its dtypes, axes and constants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from xlafuse.fusion.binding import Binding, bind
from xlafuse.fusion.graph import Graph, Value
from xlafuse.fusion.indices import Index
from xlafuse.fusion.layouts import Ref, element, number_of, operand, peel, peeled
from xlafuse.fusion.terms import Head, expand, head, narrowed, reduced_parts
from xlafuse.fusion.words import listed, noun

_COMMUTATIVE = frozenset(("dot_general", "max", "min", "eq", "ne", "and", "or"))
_MOST_STATES = 48


@dataclass(frozen=True)
class Pattern:
    """A traced definition.

    operation: what it defines. names: the names of the graph's inputs. unknowns: numbers in it that stand for any
    other, by name.
    """

    operation: str
    graph: Graph
    names: tuple[str, ...]
    unknowns: Mapping[str, float]


@dataclass(frozen=True)
class Difference:
    """A value of the program that has fewer ("rounds") or more ("keeps") bits than the pattern has there."""

    kind: Literal["rounds", "keeps"]
    value: Value


@dataclass(frozen=True)
class Match:
    """The arrays and numbers that fit, by name. variables: the program's, by the pattern's."""

    arrays: Mapping[str, Binding]
    numbers: Mapping[str, float]
    variables: Mapping[int, int]
    differences: tuple[Difference, ...] = ()

    @property
    def only_rounds(self) -> bool:
        """Returns whether the program has fewer bits and is else the pattern."""
        return all(each.kind == "rounds" for each in self.differences)


@dataclass
class Failure:
    """The difference that ended the longest attempt. fitted: how many parts fitted before it."""

    fitted: int = 0
    reason: str = ""
    at: Value | None = None


class Matcher:
    """Compares elements with those of one pattern."""

    def __init__(self, pattern: Pattern):
        self._operation = pattern.operation
        self._unknowns = pattern.unknowns
        self._inputs = dict(zip(pattern.graph.inputs, pattern.names, strict=True))
        self._outputs = pattern.graph.outputs
        self.failure = Failure()
        self._fitted = 0

    def first(self, result: Value, pieces: Sequence[tuple[int, int]] = ((0, 1),)) -> Match | None:
        """Returns the first way in which a value is the pattern's output.

        pieces: for each of several outputs, its (offset, stride) on the value's last axis.
        """
        found = element(result)

        def all_from(place: int, so_far: Match) -> Iterator[Match]:
            if place == len(pieces):
                yield so_far
                return
            for fits in self._piece(place, found, pieces[place], so_far):
                yield from all_from(place + 1, fits)

        return next(all_from(0, Match({}, {}, {})), None)

    def _piece(self, place: int, whole: Ref, piece: tuple[int, int], so_far: Match) -> Iterator[Match]:
        wanted, found = element(self._outputs[place]), whole
        offset, stride = piece
        if piece != (0, 1) or wanted.value.shape != whole.value.shape:
            last = Index(wanted.indices[-1].digits, offset, stride)
            found = Ref(whole.value, (*whole.indices[:-1], last))
        names = dict(so_far.variables)
        for mine, own in zip(wanted.indices, found.indices, strict=True):
            if own.digits:
                names[mine.digits[0][0]] = own.digits[0][0]
        yield from self._match(wanted, found, replace(so_far, variables=names))

    def output(self, place: int) -> Value:
        """Returns an output of the pattern."""
        return self._outputs[place]

    def further(self, place: int, value: Value, so_far: Match) -> bool:
        """Returns whether a value is another output of the pattern, for the arguments of a match."""
        wanted = element(self._outputs[place])
        sizes = [size for size in value.shape if size != 1]
        if [size for size in wanted.value.shape if size != 1] != sizes:
            return False
        own, mine = element(value), [index for index in wanted.indices if index.digits]
        names = dict(so_far.variables)
        for index, other in zip(mine, (each for each in own.indices if each.digits), strict=True):
            names[index.digits[0][0]] = other.digits[0][0]
        return next(self._match(wanted, own, replace(so_far, variables=names)), None) is not None

    def _match(self, wanted: Ref, found: Ref, so_far: Match) -> Iterator[Match]:
        wanted, given = peel(wanted), found
        found = peel(given)
        if wanted.value in self._inputs:
            yield from self._bind(wanted, given, so_far)
        elif (number := number_of(wanted)) is not None:
            other = number_of(found)
            if other is None:
                self._fail(found, f"{self._operation} has the number {float(number):g} here")
            elif (fits := self._number(float(number), float(other), wanted, found, so_far)) is not None:
                yield fits
            else:
                self._fail(found, f"the number is {float(other):g}, and {float(number):g} in {self._operation}")
        elif self._expand("sum", wanted) is not None and wanted.value.primitive != "neg":
            yield from self._terms("sum", wanted, found, so_far)
        elif self._expand("product", wanted) is not None:
            yield from self._terms("product", wanted, found, so_far)
        else:
            yield from self._heads(wanted, found, so_far)

    def _heads(self, wanted: Ref, found: Ref, so_far: Match) -> Iterator[Match]:
        looks = not self._chooses_by_input(wanted)
        mine, other = head(wanted, opposites=looks), head(found, opposites=looks)
        if (
            mine
            and other
            and (mine.kind, other.kind) == ("max", "reduce_max")
            and len(parts := reduced_parts(found)) == 2
        ):
            other = Head("max", other.dtype, tuple((part, 1) for part in parts))
        if mine is None or other is None or mine.kind != other.kind:
            return self._fail(found, self._no_place(wanted, found))
        if mine.kind == "dot_general" and _is_narrower(mine, other):
            other = narrowed(other) or other
        fits = so_far if mine.dtype is None else self._in_dtype(wanted, found, so_far)
        if fits is None:
            return None
        so_far = fits
        if mine.data != other.data:
            return self._fail(found, f"{noun(found.value)} has another {_differences(other.data, mine.data)}")
        if mine.kind == "position":
            if mine.index.renamed(so_far.variables) == other.index:
                yield so_far
            else:
                self._fail(found, "positions are counted along another axis")
            return None
        if mine.whole is not None and other.whole is not None:
            own = tuple(index.renamed(so_far.variables) for index in mine.whole)
            if own != other.whole or any(a.value.shape != b.value.shape for (a, _), (b, _) in _both(mine, other)):
                return self._fail(found, f"{noun(found.value)} takes other elements")
            pairs = {}
            for (a, _), (b, _) in _both(mine, other):
                for one, two in zip(a.indices, b.indices, strict=True):
                    pairs |= {one.digits[0][0]: two.digits[0][0]} if one.digits else {}
            inside = replace(so_far, variables={**so_far.variables, **pairs})
            self._fitted += 1
            yield from self._all([ref for ref, _ in mine.parts], [ref for ref, _ in other.parts], inside)
            self._fitted -= 1
            return None
        if len(mine.bound) != len(other.bound):
            axes = f"{_axes(other)}, and over {_axes(mine)} in {self._operation}"
            return self._fail(found, f"{noun(found.value)} runs over {axes}")
        self._fitted += 1
        swaps = (0, 1) if mine.kind in _COMMUTATIVE else (0,)
        for own in itertools.permutations(other.bound):
            if [index.size for index in own] != [index.size for index in mine.bound]:
                own_size, size = (math.prod(index.size for index in each.bound) for each in (other, mine))
                what = f"{noun(found.value)} runs over {own_size} elements"
                self._fail(found, f"{what}, and over {size} in {self._operation}")
                continue
            pairs = {a.digits[0][0]: b.digits[0][0] for a, b in zip(mine.bound, own, strict=True) if a.digits}
            inside = replace(so_far, variables={**so_far.variables, **pairs})
            for swapped in swaps:
                parts = [ref for ref, _ in other.parts]
                yield from self._all([ref for ref, _ in mine.parts], parts[::-1] if swapped else parts, inside)
        self._fitted -= 1
        return None

    def _chooses_by_input(self, wanted: Ref) -> bool:
        """Returns whether an array that is given decides a choice in a pattern, and is bound as the program has it."""
        return wanted.value.primitive == "select_n" and peel(operand(wanted, 0)).value in self._inputs

    def _all(self, wanted: Sequence[Ref], found: Sequence[Ref], so_far: Match) -> Iterator[Match]:
        if not wanted:
            yield so_far
            return
        # An input fits anything: what computes something is compared first.
        place = next((k for k, ref in enumerate(wanted) if peel(ref).value not in self._inputs), 0)
        rest_wanted, rest_found = list(wanted), list(found)
        first_wanted, first_found = rest_wanted.pop(place), rest_found.pop(place)
        for fits in self._match(first_wanted, first_found, so_far):
            yield from self._all(rest_wanted, rest_found, fits)

    def _terms(self, kind: str, wanted: Ref, found: Ref, so_far: Match) -> Iterator[Match]:
        if (inside := self._in_dtype(wanted, found, so_far)) is None:
            return None
        mine, number = self._flat(kind, wanted)
        # What computes something first: an input fits anything.
        mine.sort(key=lambda part: peel(part[0]).value in self._inputs)
        self._fitted += 1
        for parts, other in self._flattenings(kind, found, len(mine)):
            fits = self._number(number, other, wanted, found, inside, kind)
            if fits is not None:
                yield from self._assigned(mine, parts, fits)
            else:
                self._fail(found, other_number(kind, other, number, self._operation))
        self._fail(found, self._other_parts(kind, mine, found))
        self._fitted -= 1
        return None

    def _assigned(self, wanted, found, so_far: Match) -> Iterator[Match]:
        if not wanted:
            yield so_far
            return
        (first, sign), *rest = wanted
        for place, (other, other_sign) in enumerate(found):
            if sign != other_sign:
                continue
            for fits in self._match(first, other, so_far):
                yield from self._assigned(rest, [*found[:place], *found[place + 1 :]], fits)

    def _flat(self, kind: str, wanted: Ref) -> tuple[list[tuple[Ref, int]], float]:
        """Takes a pattern's sum or product apart, into all its parts and a number."""
        parts, number = [], 0.0 if kind == "sum" else 1.0
        pending = [(wanted, 1)]
        while pending:
            ref, sign = pending.pop(0)
            inner = None if peel(ref).value in self._inputs else self._expand(kind, ref)
            if inner is None:
                parts.append((ref, sign))
                continue
            number = _with(kind, number, inner[1], sign)
            pending = [(part, sign * own) for part, own in inner[0]] + pending
        return parts, number

    def _flattenings(self, kind: str, found: Ref, wanted: int) -> Iterator[tuple[list[tuple[Ref, int]], float]]:
        """Takes a sum or product apart, in all ways, into as many parts as wanted and a number."""
        ways: list[tuple[list[tuple[Ref, int]], float]] = [([(found, 1)], 0.0 if kind == "sum" else 1.0)]
        done = 0
        while done < min(len(ways), _MOST_STATES):
            parts, number = ways[done]
            done += 1
            for place, (ref, sign) in enumerate(parts):
                inner = self._expand(kind, ref)
                if inner is None:
                    continue
                new, total = [], _with(kind, number, inner[1], sign)
                for part, own in inner[0]:
                    if (constant := number_of(part)) is None:
                        new.append((part, sign * own))
                    else:
                        total = _with(kind, total, float(constant), sign * own)
                if len(parts) - 1 + len(new) <= wanted:
                    ways.append(([*parts[:place], *new, *parts[place + 1 :]], total))
        yield from (way for way in reversed(ways) if len(way[0]) == wanted)

    def _expand(self, kind: str, ref: Ref) -> tuple[list[tuple[Ref, int]], float] | None:
        return expand(kind, ref)

    def _in_dtype(self, wanted: Ref, found: Ref, so_far: Match) -> Match | None:
        """Returns the match if an element has the dtype that the pattern has there."""
        if wanted.value.dtype == found.value.dtype:
            return so_far
        what, dtype = noun(found.value), found.value.dtype
        return self._fail(found, f"{what} is in {dtype}, and in {wanted.value.dtype} in {self._operation}")

    def _number(self, wanted: float, found: float, place: Ref, at: Ref, so_far: Match, kind: str = "") -> Match | None:
        """Returns the match with a number of the program, at an element, that is the pattern's at a place."""
        dtype = place.value.dtype
        for name, unknown in self._unknowns.items():
            for power in (1, -1) if kind == "product" else (1,):
                if not _close(wanted, unknown**power, dtype):
                    continue
                value = _shortest(found) ** power if found else found
                known = so_far.numbers.get(name, value)
                if not _close(known, value, dtype):
                    return None
                return replace(so_far, numbers={**so_far.numbers, name: known})
        return so_far if _close(wanted, found, dtype) else None

    def _bind(self, wanted: Ref, given: Ref, so_far: Match) -> Iterator[Match]:
        name = self._inputs[wanted.value]
        layouts = peeled(given)
        found = layouts[-1]
        if wanted.value.dtype != found.value.dtype:
            dtypes = f"{found.value.dtype}, and in {wanted.value.dtype} in {self._operation}"
            return self._fail(found, f"{name} is in {dtypes}")
        yield from self._bound(wanted, layouts, so_far)
        return None

    def _bound(self, wanted: Ref, layouts: Sequence[Ref], so_far: Match) -> Iterator[Match]:
        """Yields the match with an argument bound to one of an element's layouts."""
        name, found = self._inputs[wanted.value], layouts[-1]
        if found.value.literal is not None or number_of(found) is not None:
            return self._fail(found, f"{name} is a number")
        # The value behind most layouts that the argument is a layout of, too.
        bound = (bind(wanted, ref, so_far.variables) for ref in reversed(layouts) if not ref.value.is_imagined)
        binding = next((each for each in bound if each is not None), None)
        if binding is None:
            own, other = wanted.value.shape, found.value.shape
            is_moved = sorted(n for n in own if n > 1) == sorted(n for n in other if n > 1)
            how = f"in another layout than {own}" if is_moved else f"and {own} in {self._operation}"
            how = how if own != other else f"and {self._operation} reads it in another order"
            return self._fail(found, f"{name} is {other}, {how}")
        if so_far.arrays.get(name, binding) != binding:
            return self._fail(found, f"the program reads several arrays where {self._operation} reads {name} again")
        yield replace(so_far, arrays={**so_far.arrays, name: binding})
        return None

    def _no_place(self, wanted: Ref, found: Ref) -> str:
        if found.value.equation is None:
            return f"{noun(found.value)} is given, and {self._operation} computes {noun(wanted.value)} there"
        return f"{self._operation} has no {noun(found.value).removeprefix('an ').removeprefix('a ')} here"

    def _other_parts(self, kind: str, mine: Sequence[tuple[Ref, int]], found: Ref) -> str:
        parts = self._flat(kind, found)[0]
        own, other = (listed([noun(peel(ref).value) for ref, _ in each]) for each in (parts, mine))
        return f"the program computes a {kind} of {own}, and {self._operation} one of {other}"

    def _fail(self, found: Ref, reason: str) -> None:
        if self._fitted > self.failure.fitted:
            self.failure = Failure(self._fitted, reason, found.value)


def _with(kind: str, number: float, other: float, sign: int) -> float:
    if kind == "sum":
        return number + sign * other
    return number * other if sign > 0 else number / other if other else math.nan


def _close(one: float, other: float, dtype: Any) -> bool:
    if not np.issubdtype(dtype, np.integer) and dtype != np.bool_:
        epsilon = 2 ** -(22 if np.dtype(dtype).itemsize >= 4 else 7)
        return one == other or abs(one - other) <= epsilon * max(abs(one), abs(other))
    return one == other


def _shortest(number: float) -> float:
    """Returns a number as one writes it: 1e-6 and not what float32 makes of it."""
    rounded = np.asarray(number, np.float32)
    return float(str(rounded)) if float(rounded) == number else float(number)


def _is_narrower(mine: Head, other: Head) -> bool:
    """Returns whether the operands of a contraction have fewer bits than those of another one."""
    return all(a.value.dtype.itemsize < b.value.dtype.itemsize for (a, _), (b, _) in _both(mine, other))


def _both(mine: Head, other: Head):
    return zip(mine.parts, other.parts, strict=True)


def other_number(kind: str, found: float, wanted: float, operation: str) -> str:
    """Names a number of a sum or a product that is not the operation's."""
    if kind == "product" and found and 0 < wanted < 1 and _close(round(1 / wanted) * wanted, 1.0, np.float32):
        if found == 1.0:
            return f"the program takes a sum, and {operation} the mean of {1 / wanted:g} numbers"
        return f"the program divides a sum by {1 / found:g}, and {operation} by {1 / wanted:g}, the length of the rows"
    verb, neutral = ("adds", 0.0) if kind == "sum" else ("multiplies by", 1.0)
    if found == neutral:
        return f"{operation} {verb} {wanted:g}, and the program does not"
    own = f"{operation} {verb} {wanted:g}" if wanted != neutral else f"{operation} does not"
    return f"the program {verb} {found:g}, and {own}"


def _axes(head: Head) -> str:
    return f"{len(head.bound)} axes" if len(head.bound) > 1 else "one axis"


def _differences(found: Any, wanted: Any) -> str:
    """Names the parameters that differ, with their values where these are short."""
    own = dict(wanted) if all(isinstance(each, tuple) and len(each) == 2 for each in wanted) else {}
    words = []
    for name, value in own.items():
        other = dict(found).get(name)
        if other != value:
            both = f"{other} and not {value}"
            words.append(f"{name} ({both})" if len(both) <= 60 else name)
    return ", ".join(words) or "precision"
