"""Layered layout of the launches, by scope and within each scope, for a script to draw.

Two levels: scopes as boxes in layers, and inside each scope its launches. igraph's Sugiyama layout (Sugiyama, Tagawa,
Toda 1981) places both; a scope opened or closed by the reader changes box sizes, never the order within a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import igraph

from hlo_analysis.records import Analysis, Phase


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place in a layer: a cluster, or the passage of a long edge."""

    cluster: int | None
    x: float
    """Wanted position across, in units of one column."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The launches of one scope and phase, and where each sits inside: (column, layer), both from 0."""

    scope: str
    phase: Phase
    launches: tuple[int, ...]
    places: tuple[tuple[float, int], ...]


@dataclass(frozen=True, kw_only=True)
class Route:
    """Between two clusters: the slots (layer, slot) that the edge passes, ends left out."""

    source: int
    target: int
    via: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class LaunchGraph:
    """Clusters in layers, routes between them, and every edge (producer launch, consumer launch, bytes)."""

    clusters: tuple[Cluster, ...]
    layers: tuple[tuple[Slot, ...], ...]
    routes: tuple[Route, ...]
    edges: tuple[tuple[int, int, int], ...]


def launch_graph(analysis: Analysis) -> LaunchGraph:
    """Lays the analysis out: the launches as nodes, values that one hands another as edges."""
    edges = _edges(analysis)
    members: dict[tuple[str, Phase], list[int]] = {}
    for launch in analysis.launches:
        members.setdefault((launch.scope, launch.phase), []).append(launch.index)
    home = {index: number for number, group in enumerate(members.values()) for index in group}
    between = {(home[a], home[b]) for a, b, _ in edges if home[a] != home[b]}
    layers, routes = _layered(len(members), sorted(between))
    clusters = tuple(
        Cluster(scope=scope, phase=phase, launches=tuple(group), places=_inside(group, edges))
        for (scope, phase), group in members.items()
    )
    return LaunchGraph(clusters=clusters, layers=layers, routes=routes, edges=edges)


def _edges(analysis: Analysis) -> tuple[tuple[int, int, int], ...]:
    """Bytes from launch to launch, values between one pair added up."""
    totals: dict[tuple[int, int], int] = {}
    for launch in analysis.launches:
        for value in launch.inputs:
            if value.producer is not None and value.producer != launch.index:
                pair = (value.producer, launch.index)
                totals[pair] = totals.get(pair, 0) + value.bytes
    return tuple((source, target, size) for (source, target), size in totals.items())


def _sugiyama(
    count: int, edges: Sequence[tuple[int, int]]
) -> tuple[list[tuple[float, int]], list[list[tuple[float, int]]]]:
    """(column, layer) of each vertex, and of the bends of each edge from its first vertex to its second."""
    # Edges against program order (loops, interleaved scopes) are laid out reversed: the layering wants no cycles.
    forward = [(min(edge), max(edge)) for edge in edges]
    layout: Any = igraph.Graph(n=count, edges=forward, directed=True).layout_sugiyama(maxiter=200)
    places = [(float(x), round(y)) for x, y in layout.coords]
    bends = [sorted(((float(x), round(y)) for x, y in bend), key=lambda at: at[1]) for bend in layout.edge_routing]
    for (source, target), bend in zip(edges, bends, strict=True):
        if source > target:
            bend.reverse()
    return places, bends


def _layered(count: int, edges: Sequence[tuple[int, int]]) -> tuple[tuple[tuple[Slot, ...], ...], tuple[Route, ...]]:
    places, bends = _sugiyama(count, edges)
    everything = [*((place, vertex) for vertex, place in enumerate(places)), *((at, None) for b in bends for at in b)]
    rows: list[list[tuple[float, int | None]]] = [
        [] for _ in range(1 + max((y for (_, y), _ in everything), default=-1))
    ]
    for (x, y), cluster in everything:
        rows[y].append((x, cluster))
    for row in rows:
        row.sort(key=lambda slot: slot[0])
    position = {(y, x): number for y, row in enumerate(rows) for number, (x, _) in enumerate(row)}
    layers = tuple(tuple(Slot(cluster=cluster, x=x) for x, cluster in row) for row in rows)
    routes = tuple(
        Route(source=source, target=target, via=tuple((y, position[y, x]) for x, y in bend))
        for (source, target), bend in zip(edges, bends, strict=True)
    )
    return layers, routes


def _inside(group: Sequence[int], edges: Iterable[tuple[int, int, int]]) -> tuple[tuple[float, int], ...]:
    """Where the launches of one cluster sit in it."""
    local = {index: number for number, index in enumerate(group)}
    inner = [(local[a], local[b]) for a, b, _ in edges if a in local and b in local]
    places, _ = _sugiyama(len(group), inner)
    return tuple(places[: len(group)])
