"""Orders a program's equations and sites."""

from __future__ import annotations

from collections.abc import Sequence

from xlafuse.fusion.graph import Equation, Graph, Value
from xlafuse.fusion.site import Site


def schedule(graph: Graph, sites: Sequence[Site]) -> list[Equation | Site]:
    """Orders equations and sites, each after those it needs; effects keep the program's order."""
    ordered = _ordered(graph, sites)
    assert ordered is not None, "sites need each other's results"
    return ordered


def is_acyclic(graph: Graph, sites: Sequence[Site]) -> bool:
    """Returns whether no site needs its own results."""
    return _ordered(graph, sites) is not None


def _ordered(graph: Graph, sites: Sequence[Site]) -> list[Equation | Site] | None:
    producers: dict[Value, Equation | Site] = {}
    for equation in graph.equations:
        producers.update(dict.fromkeys(equation.outputs, equation))
    for site in sites:
        producers.update(dict.fromkeys(site.results, site))
    ordered: list[Equation | Site] = []
    begun: set[int] = set()
    done: set[int] = set()
    effects = [equation for equation in graph.equations if equation.has_effects]
    wanted = [producers[value] for value in graph.outputs if value in producers]
    wanted.sort(key=lambda each: each.root.index if isinstance(each, Site) else each.index)
    for root in (*effects, *wanted):
        pending = [(root, False)]
        while pending:
            unit, is_ready = pending.pop()
            if id(unit) in done:
                continue
            if is_ready:
                done.add(id(unit))
                ordered.append(unit)
                continue
            if id(unit) in begun:
                return None
            begun.add(id(unit))
            pending.append((unit, True))
            needed = (producers[value] for value in reversed(_needs(unit)) if value in producers)
            pending += [(each, False) for each in needed if id(each) not in done]
    return ordered


def _needs(unit: Equation | Site) -> list[Value]:
    return [binding.value for binding in unit.arrays.values()] if isinstance(unit, Site) else list(unit.inputs)
