"""Finds layers that a program writes out one after the other, so that only one of them is searched.

The equations of such layers are equal up to names. A site of one layer is moved to another where each equation that it
covers has an equal one there, whose operands correspond: so the operation computes the same of those.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from xlafuse.fusion.graph import Equation, Graph, Value, frozen
from xlafuse.fusion.site import Site

_WINDOW = 128
"""How many equations before two values must be equal: about a layer's."""


class Repeats:
    """Finds for each value of a graph the first one that equal equations lead to."""

    def __init__(self, graph: Graph):
        self._equations = graph.equations
        self._place = {equation: place for place, equation in enumerate(graph.equations)}
        numbers: dict[Hashable, int] = {}
        self._keys = [numbers.setdefault(_key(equation), len(numbers)) for equation in graph.equations]
        self._first = _first_alike(self._keys)

    def first_alike(self, value: Value) -> Value | None:
        """Returns the first value that equal equations lead to; None if that is this one."""
        if value.equation is None:
            return None
        place = self._place[value.equation]
        first = self._first[place]
        return None if first == place else self._equations[first].outputs[value.position]

    def moved(self, site: Site, value: Value) -> Site | None:
        """Moves a site to a later value; returns None if the equations there are not equal to those that it covers."""
        pairs: dict[Value, Value] = {}
        inside = site.covered | site.shared
        pending = [(site.results[0], value)]
        while pending:
            one, other = pending.pop()
            if one in pairs:
                if pairs[one] is not other:
                    return None
                continue
            pairs[one] = other
            if one is other and one.equation not in inside:
                continue
            if (one.shape, one.dtype, one.equation is None) != (other.shape, other.dtype, other.equation is None):
                return None
            if one.literal is not None or other.literal is not None:
                return None  # equal literals are one value
            if one.equation in inside:
                assert one.equation is not None and other.equation is not None
                if self._key_of(one.equation) != self._key_of(other.equation):
                    return None
                pending += zip(one.equation.outputs, other.equation.outputs, strict=True)
                pending += zip(one.equation.inputs, other.equation.inputs, strict=True)
        if len(set(pairs.values())) < len(pairs):
            return None
        covered, shared = (
            frozenset(made for each in own if (made := pairs[each.outputs[0]].equation) is not None)
            for own in (site.covered, site.shared)
        )
        return replace(
            site,
            results=tuple(pairs[each] if each.equation else Value(each.aval) for each in site.results),
            arrays={name: replace(each, value=pairs[each.value]) for name, each in site.arrays.items()},
            covered=covered,
            shared=shared,
        )

    def _key_of(self, equation: Equation) -> int:
        return self._keys[self._place[equation]]


def _key(equation: Equation) -> Hashable:
    """Returns a key that two equations share if they differ in names and literals only, and stand on one line."""
    types = tuple((each.shape, each.dtype) for each in (*equation.inputs, *equation.outputs))
    return equation.primitive, frozen(equation.params), types, equation.source.source_info.traceback


def _first_alike(keys: Sequence[int]) -> list[int]:
    """Returns, for each place, the first one whose last `_WINDOW` keys are the same."""
    first: dict[int, int] = {}
    windows = (tuple(keys[max(0, end - _WINDOW) : end]) for end in range(1, len(keys) + 1))
    return [first.setdefault(hash(window), place) for place, window in enumerate(windows)]
