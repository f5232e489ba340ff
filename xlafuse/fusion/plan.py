"""Plans which equations of a program become calls of operations: finds sites, and chooses some that do not overlap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xlafuse.fusion.binding import Binding, has_all, transposed
from xlafuse.fusion.combine import combined
from xlafuse.fusion.graph import Equation, Graph, Value, build, is_free
from xlafuse.fusion.odd_sizes import NAME as PADDED
from xlafuse.fusion.odd_sizes import padded_products
from xlafuse.fusion.reasons import refusals
from xlafuse.fusion.search import Search
from xlafuse.fusion.site import Refusal, Site
from xlafuse.fusion.spellings import Choices
from xlafuse.fusion.words import noun


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The sites of a graph.

    written: sites that XLA computes best, whose equations stay. inner: the plans of the bodies of loops and calls, by
    equation and parameter. why_not: makes `refusals`.
    """

    graph: Graph
    sites: tuple[Site, ...]
    written: tuple[Site, ...]
    inner: Mapping[Equation, Mapping[str, tuple[Plan, ...]]]
    why_not: Callable[[], tuple[Refusal, ...]]

    @functools.cached_property
    def refusals(self) -> tuple[Refusal, ...]:
        """The values that are nearly results of operations, and why they are not. Computing it takes time."""
        return self.why_not()

    @property
    def changes(self) -> bool:
        """Returns whether there is a site, at any depth."""
        return bool(
            self.sites or any(plan.changes for own in self.inner.values() for plans in own.values() for plan in plans)
        )

    def walk(self) -> Iterator[Plan]:
        """Yields this plan and those inside it."""
        yield self
        for own in self.inner.values():
            for plans in own.values():
                for plan in plans:
                    yield from plan.walk()


BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "shard_map": ("jaxpr",),
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
}
"""Primitives whose bodies are rewritten, too. Not `custom_vjp_call`, whose rules belong to its own body."""


def make_plan(jaxpr: Any, choices: Choices = Choices()) -> Plan:  # noqa: B008 (it is frozen)
    """Plans a `Jaxpr`."""
    graph = build(jaxpr)
    search = Search(graph, choices.allow)
    candidates = [site for spelling in choices.spellings for site in search.sites(spelling)]
    sites, overlapping = _reading_only_results(*_without_overlap(graph, candidates))
    sites, written, combining = combined(graph, sites, choices)
    if PADDED in choices:
        padded = padded_products(graph, sites)
        roots = {site.root for site in padded}
        sites, written = (*sites, *padded), tuple(site for site in written if roots.isdisjoint(site.covered))
    inner = {}
    for equation in graph.equations:
        bodies = {}
        for name in BODIES.get(equation.primitive, ()):
            given = equation.params[name]
            own = given if isinstance(given, tuple | list) else (given,)
            bodies[name] = tuple(make_plan(getattr(body, "jaxpr", body), choices) for body in own)
        if bodies:
            inner[equation] = bodies

    def why_not() -> tuple[Refusal, ...]:
        found = refusals(search, (*sites, *written), combining, overlapping)
        return tuple(each for each in found if each.operation in choices)

    return Plan(graph=graph, sites=sites, written=written, inner=inner, why_not=why_not)


def _without_overlap(graph: Graph, candidates: Sequence[Site]) -> tuple[tuple[Site, ...], list[Refusal]]:
    """Chooses sites that do not overlap, the largest first. Refuses those whose inner values others use."""
    returned = set(graph.outputs)
    chosen: list[Site] = []
    refused: list[Refusal] = []
    taken: set[Equation] = set()
    for site in sorted(candidates, key=_weight, reverse=True):
        own = site.own
        if own & taken:
            continue
        escaping = next((value for value in _inner(site) if _escapes(value, site, returned)), None)
        if escaping is not None:
            what = f"{noun(escaping)}, {escaping.dtype}{list(escaping.shape)}"
            reason = f"a value inside it ({what}) is needed elsewhere, too"
            refused.append(Refusal(operation=site.operation, value=site.results[0], reason=reason))
            continue
        chosen.append(site)
        taken |= own
    return tuple(chosen), refused


def _reading_only_results(sites: Sequence[Site], refused: list[Refusal]) -> tuple[tuple[Site, ...], list[Refusal]]:
    """Lets sites read other sites' results in place of values inside those sites, which a call does not return.

    Refuses the smaller of two sites where an argument is no layout of a result. sites: the largest first.
    """
    kept, place = list(sites), 0
    results, owners = _owned(kept)
    while place < len(kept):
        site = kept[place]
        arrays, place = dict(site.arrays), place + 1
        for name, binding in site.arrays.items():
            inner = _equation_computing(binding.value, results)
            producer = None if inner is None else owners.get(inner)
            if producer is None or producer is site:
                continue
            read = _read_as_result(binding, producer)
            if read is None:
                smaller = max(site, producer, key=kept.index)
                reason = f"an argument is a value inside {producer.operation}"
                refused.append(Refusal(operation=smaller.operation, value=smaller.results[0], reason=reason))
                kept.remove(smaller)
                results, owners = _owned(kept)
                place = 0
                break
            arrays[name] = read
        else:
            kept[place - 1] = replace(site, arrays=arrays)
            owners |= dict.fromkeys(site.own, kept[place - 1])
    return tuple(kept), refused


def _owned(sites: Sequence[Site]) -> tuple[set[Value], dict[Equation, Site]]:
    """Returns the results of sites, and the site that each equation is part of."""
    return {value for each in sites for value in each.results}, {own: each for each in sites for own in each.own}


def _equation_computing(value: Value, results: set[Value]) -> Equation | None:
    """Returns the equation that computes a value, up to its layout; None for a result of a site and for an input."""
    while value not in results and value.equation is not None and is_free(value.equation) and value.equation.inputs:
        value = value.equation.inputs[0]
    return None if value in results else value.equation


def _read_as_result(binding: Binding, producer: Site) -> Binding | None:
    """Returns the argument as the result of the site that computes it, if that is the whole value in another layout."""
    if not has_all(binding):
        return None
    for result in producer.results:
        value = result
        while value is not binding.value and value.primitive == "reshape" and value.equation is not None:
            value = value.equation.inputs[0]
        order = tuple(range(len(value.shape)))
        while value is not binding.value and value.primitive == "transpose" and value.equation is not None:
            order = tuple(value.equation.params["permutation"][axis] for axis in order)
            value = value.equation.inputs[0]
        if value is binding.value:
            places = tuple((0, 1, size) for size in result.shape)
            return replace(transposed(binding, order), value=result, places=places)
    return None


def _weight(site: Site) -> tuple[int, int, int]:
    """Weighs a site by its equations; of equal ones, that with the fewest layouts is the larger."""
    casts = sum(equation.primitive == "convert_element_type" for equation in site.covered)
    return len(site.own), casts, -len(site.covered)


def _inner(site: Site) -> Iterator[Value]:
    for equation in site.own:
        yield from (value for value in equation.outputs if value not in site.results)


def _escapes(value: Value, site: Site, returned: set[Value]) -> bool:
    """Returns whether a value inside a site is needed outside it, as it is or in another layout."""
    return value in returned or any(
        user not in site.covered
        or (is_free(user) and any(_escapes(each, site, returned) for each in user.outputs if each not in site.results))
        for user in value.users
    )
