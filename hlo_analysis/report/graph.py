"""Lays out the launches as a layered graph, by scope and within each scope, for a script to draw.

The graph has two levels: scopes are boxes in layers, and each scope contains its launches. Where there are many scopes,
all scopes of one layer of the model are one box; where there are many layers, all layers of a stack are. igraph's
Sugiyama layout (Sugiyama, Tagawa, Toda 1981) places both. Opening or closing a scope changes the sizes of boxes, never
the order in a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hlo_analysis.records import Analysis, Launch, Phase
from hlo_analysis.report.similar_layers import layer_of, without_layer_numbers

type Layer = tuple[int | None, ...]
"""The slots of a layer from left to right: the number of a cluster, or None where a line crosses the layer."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The launches of one scope (or source line, if they have no scope), or of one layer of the model, and one phase.

    `places` holds the place of each inside: (column, layer), both from 0.
    """

    scope: str
    phase: Phase
    launches: tuple[int, ...]
    places: tuple[tuple[float, int], ...]


@dataclass(frozen=True, kw_only=True)
class Route:
    """The path of an edge between two clusters: the slots (layer, slot) that it passes, without its ends."""

    source: int
    target: int
    via: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class LaunchGraph:
    """Clusters in layers, routes between them, and every edge (producer launch, consumer launch, bytes)."""

    clusters: tuple[Cluster, ...]
    layers: tuple[Layer, ...]
    routes: tuple[Route, ...]
    edges: tuple[tuple[int, int, int], ...]


def launch_graph(analysis: Analysis) -> LaunchGraph:
    """Lays out the analysis: launches are nodes, values between launches are edges."""
    edges = _edges(analysis)
    groups = _clusters(analysis, edges)
    home = {index: number for number, (_, group) in enumerate(groups) for index in group}
    between = {(home[a], home[b]) for a, b, _ in edges if home[a] != home[b]}
    layers, routes = _layered(len(groups), sorted(between))
    clusters = tuple(
        Cluster(scope=scope, phase=phase, launches=tuple(group), places=_inside(group, edges))
        for (scope, phase), group in groups
    )
    return LaunchGraph(clusters=clusters, layers=layers, routes=routes, edges=edges)


def _clusters(analysis: Analysis, edges: Iterable[tuple[int, int, int]]) -> list[tuple[tuple[str, Phase], list[int]]]:
    """Groups launches of one scope into clusters, such that no path leaves a cluster and returns.

    A scope that works both before and after another gets more than one cluster. Clusters can then be drawn in layers
    with every line pointing down.
    """
    foldings = (_by_scope, _by_layer, _by_stack)
    key_of = next((key for key in foldings if len(set(map(key, analysis.launches))) <= _MOST_SCOPES), _by_stack)
    sources: dict[int, list[int]] = {}
    for source, target, _ in edges:
        sources.setdefault(target, []).append(source)
    clusters: list[tuple[tuple[str, Phase], list[int]]] = []
    below: list[set[int]] = []  # the clusters that a path from each cluster reaches
    home: dict[int, int] = {}
    for launch in analysis.launches:
        key = key_of(launch)
        above = {home[source] for source in sources.get(launch.index, ()) if source in home}
        own = [number for number, (scope, _) in enumerate(clusters) if scope == key]
        fitting = (number for number in reversed(own) if not above & below[number])
        number = next(fitting, len(clusters))
        if number == len(clusters):
            clusters.append((key, []))
            below.append(set())
        clusters[number][1].append(launch.index)
        home[launch.index] = number
        above.discard(number)
        for other in range(len(clusters)):
            if other in above or above & below[other]:
                below[other] |= {number} | below[number]
    return clusters


_MOST_SCOPES = 16
"""More boxes than these are folded: lines between them could not be followed."""


def _by_scope(launch: Launch) -> tuple[str, Phase]:
    return launch.group, launch.phase


def _by_layer(launch: Launch) -> tuple[str, Phase]:
    """Returns the scope up to the first part that ends in a number; of a source line its file."""
    if not launch.scope:
        return launch.group.rpartition(":")[0] or launch.group, launch.phase
    return layer_of(launch.scope, launch.phase)[0] or launch.scope.partition("/")[0], launch.phase


def _by_stack(launch: Launch) -> tuple[str, Phase]:
    """Returns the layer with '*' for its number: all layers of a stack are one box."""
    layer, phase = _by_layer(launch)
    return without_layer_numbers(layer), phase


def _edges(analysis: Analysis) -> tuple[tuple[int, int, int], ...]:
    """Returns the bytes on each edge between two launches, summed over the values."""
    totals: dict[tuple[int, int], int] = {}
    for launch in analysis.launches:
        for value in launch.inputs:
            if value.producer is not None and value.producer != launch.index:
                pair = (value.producer, launch.index)
                totals[pair] = totals.get(pair, 0) + value.bytes
    return tuple((source, target, size) for (source, target), size in totals.items())


type Place = tuple[float, int]
"""Column and layer, both from 0."""


def _sugiyama(count: int, edges: Sequence[tuple[int, int]]) -> tuple[list[Place], list[list[Place]]]:
    """Places each vertex, and the bends of each edge from its first vertex to its second.

    Connected components are laid out separately, side by side: for several components, igraph 1.0.0 gives the bends to
    the wrong edges.
    """
    import igraph

    places: list[Place] = [(0.0, 0)] * count
    bends: list[list[Place]] = [[] for _ in edges]
    shift = 0.0
    for part in igraph.Graph(n=count, edges=list(edges)).connected_components():
        local = {vertex: number for number, vertex in enumerate(part)}
        inner = [number for number, (source, _) in enumerate(edges) if source in local]
        pairs = [(local[edges[number][0]], local[edges[number][1]]) for number in inner]
        layout: Any = igraph.Graph(n=len(part), edges=pairs, directed=True).layout_sugiyama(maxiter=200)
        for vertex, (x, y) in zip(part, layout.coords, strict=True):
            places[vertex] = (float(x) + shift, round(y))
        for number, bend in zip(inner, layout.edge_routing, strict=True):
            source, target = edges[number]
            points = ((float(x) + shift, round(y)) for x, y in bend)
            bends[number] = sorted(points, key=lambda at: at[1], reverse=places[source][1] > places[target][1])
        shift = 1 + max(x for x, _ in (*places, *(point for bend in bends for point in bend)))
    return places, bends


def _layered(count: int, edges: Sequence[tuple[int, int]]) -> tuple[tuple[Layer, ...], tuple[Route, ...]]:
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
    layers = tuple(tuple(cluster for _, cluster in row) for row in rows)
    routes = tuple(
        Route(source=source, target=target, via=tuple((y, position[y, x]) for x, y in bend))
        for (source, target), bend in zip(edges, bends, strict=True)
    )
    return layers, routes


def _inside(group: Sequence[int], edges: Iterable[tuple[int, int, int]]) -> tuple[tuple[float, int], ...]:
    """Places the launches of one cluster inside it."""
    local = {index: number for number, index in enumerate(group)}
    inner = [(local[a], local[b]) for a, b, _ in edges if a in local and b in local]
    places, _ = _sugiyama(len(group), inner)
    return tuple(places[: len(group)])
