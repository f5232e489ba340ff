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
"""Equations that end with a value's. Where they are equal, so is what a search sees: a layer has about as many."""


class Repeats:
    """The values of a graph that later ones repeat: the same equations come before both."""

    def __init__(self, graph: Graph):
        self._equations = graph.equations
        self._place = {equation: place for place, equation in enumerate(graph.equations)}
        numbers: dict[Hashable, int] = {}
        self._keys = [numbers.setdefault(_key(equation), len(numbers)) for equation in graph.equations]
        self._models = _first_alike(self._keys)

    def model(self, value: Value) -> Value | None:
        """Returns the first value that a value repeats; None where it is the first itself."""
        if value.equation is None:
            return None
        place = self._place[value.equation]
        model = self._models[place]
        return None if model == place else self._equations[model].outputs[value.position]

    def moved(self, site: Site, value: Value) -> Site | None:
        """Returns the site whose first result is a value; None where its equations are not those of the given site."""
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
    """Returns what equal equations of two layers share, their place in the program's text among it."""
    types = tuple((each.shape, each.dtype) for each in (*equation.inputs, *equation.outputs))
    return equation.primitive, frozen(equation.params), types, equation.source.source_info.traceback


def _first_alike(keys: Sequence[int]) -> list[int]:
    """Returns for each place the first one before which, and at which, the same keys are."""
    first: dict[int, int] = {}
    found, base, modulus = [], 1_000_003, 2**61 - 1
    highest, window = pow(base, _WINDOW, modulus), 0
    for place, key in enumerate(keys):
        window = (window * base + key + 1) % modulus
        if place >= _WINDOW:
            window = (window - (keys[place - _WINDOW] + 1) * highest) % modulus
        found.append(first.setdefault(window, place))
    return found
