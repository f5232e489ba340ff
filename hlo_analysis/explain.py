"""Finds edges between launches by the names of their ends, with XLA's decisions and costs, and the PTX of launches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hlo_analysis.decisions.log import GEMM_PASS, SOFTMAX_PASS
from hlo_analysis.decisions.unfused_edges import CONFIG_PASS, PRIORITY_PASS
from hlo_analysis.errors import UnknownEdgeError, nearest_names
from hlo_analysis.records import Analysis, Decision, MissedFusion

PASS_ORDER = (GEMM_PASS, SOFTMAX_PASS, PRIORITY_PASS, CONFIG_PASS)
"""The passes that decide on fusion, in XLA:GPU's order; decisions without a pass come last."""

_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The data from one launch to another, or between instructions of one launch."""

    producer: int
    consumer: int
    """Indices in `Analysis.launches`; equal if one launch contains both ends."""
    decisions: tuple[Decision, ...]
    """Decisions in the order of XLA's passes."""
    missed: MissedFusion | None = None
    """Returns what the edge costs and its remedy, or None if it costs nothing, as inside one launch."""

    @property
    def bytes(self) -> int:
        """Returns the size of the data on the edge."""
        return max((decision.bytes for decision in self.decisions), default=0)


def edges_of(analysis: Analysis) -> tuple[Edge, ...]:
    """Returns every edge between two launches, the costliest first: by the time still at stake, then by size."""
    decided: dict[tuple[int, int], list[Decision]] = {}
    for decision in analysis.decisions:
        if decision.producer_launch is not None and decision.consumer_launch is not None:
            decided.setdefault((decision.producer_launch, decision.consumer_launch), []).append(decision)
    missed: dict[tuple[int, int], MissedFusion] = {}
    for item in reversed(analysis.missed):
        missed |= {(item.producer, consumer): item for consumer in item.consumers if consumer != item.producer}
    reads = ((producer, launch.index) for launch in analysis.launches for producer in launch.producers)
    pairs = dict.fromkeys((*decided, *missed, *reads))
    edges = [
        Edge(producer=pair[0], consumer=pair[1], decisions=_in_order(decided.get(pair, ())), missed=missed.get(pair))
        for pair in pairs
        if pair[0] != pair[1]
    ]
    return tuple(sorted(edges, key=_cost))


def launches_named(analysis: Analysis, name: str) -> tuple[int, ...]:
    """Returns the indices of the launches that match a name, as in `find_edges`.

    Raises:
        UnknownEdgeError: nothing matches; the message lists the nearest names.
    """
    return tuple(sorted({end.launch for end in _ends(analysis, name)}))


def find_edges(analysis: Analysis, name: str) -> tuple[Edge, ...]:
    """Returns the edges of all launches that match a name, the costliest first.

    Args:
        analysis: the program.
        name: the name of a launch or of an instruction in it; a launch's number, as 3 or #3; an HLO opcode; or part of
            a launch's name, op name, scope or source line.

    Raises:
        UnknownEdgeError: nothing matches; the message lists the nearest names.
    """
    launches = set(launches_named(analysis, name))
    return tuple(edge for edge in edges_of(analysis) if {edge.producer, edge.consumer} & launches)


def find_edge(analysis: Analysis, producer: str, consumer: str) -> Edge:
    """Returns the one edge between two names; if one launch contains both, XLA's decisions inside it.

    Args:
        analysis: the program.
        producer: the launch or instruction that writes the value, named as in `find_edges`.
        consumer: the launch or instruction that reads it.

    Raises:
        UnknownEdgeError: a name is unknown, several edges match, or no edge does; the message lists the nearest.
    """
    sources, users = _ends(analysis, producer), _ends(analysis, consumer)
    edges = edges_of(analysis)
    pairs = {(source.launch, user.launch) for source in sources for user in users}
    between = [edge for edge in edges if (edge.producer, edge.consumer) in pairs]
    shared = sorted({source.launch for source in sources} & {user.launch for user in users})
    are_inside = all(end.instruction is not None for end in (*sources, *users))
    if len(shared) == 1 and (not between or are_inside):
        return _inside(analysis, shared[0], sources, users)
    if len(between) == 1:
        return between[0]
    if between:
        raise UnknownEdgeError(
            f"{producer!r} and {consumer!r} fit {len(between)} edges: {_listed(analysis, between)}; name launches by "
            "number"
        )
    if shared:
        raise UnknownEdgeError(
            f"{producer!r} and {consumer!r} are both in {len(shared)} launches: "
            f"{', '.join(_launch(analysis, index) for index in shared[:_SHOWN])}; name one by number"
        )
    at = {end.launch for end in (*sources, *users)}
    near = [edge for edge in edges if {edge.producer, edge.consumer} & at]
    raise UnknownEdgeError(
        f"no value goes from {producer!r} to {consumer!r}"
        + (f"; the edges at them: {_listed(analysis, near)}" if near else "")
    )


def find_ptx(analysis: Analysis, name: str) -> str:
    """Returns the PTX of all launches that a name refers to, each source once, under a comment that lists its launches.

    Args:
        analysis: the program.
        name: as in `find_edges`.

    Raises:
        UnknownEdgeError: nothing matches, or no launch that matches has PTX.
    """
    users: dict[int, list[int]] = {}
    found = list(dict.fromkeys(end.launch for end in _ends(analysis, name)))
    for index in found:
        if (place := analysis.launches[index].ptx) is not None:
            users.setdefault(place, []).append(index)
    if not users:
        listed = ", ".join(f"{_launch(analysis, index)} ({analysis.launches[index].kind})" for index in found[:_SHOWN])
        raise UnknownEdgeError(f"no PTX of {listed}: copies and library calls have none, and old captures kept none")
    return "\n".join(
        f"// {', '.join(_launch(analysis, index) for index in indices)}\n{analysis.ptx[place].strip()}"
        for place, indices in users.items()
    )


def apart_because(edge: Edge) -> str:
    """Returns why the ends are apart: the last pass that decided, and its reason in XLA's words or ours in brackets."""
    apart = [decision for decision in edge.decisions if decision.verdict != "fused"]
    if apart:
        return f"{apart[-1].pass_name}: {apart[-1].reason}" if apart[-1].pass_name else apart[-1].reason
    return edge.missed.reason if edge.missed else "[no pass recorded a reason]"


@dataclass(frozen=True, kw_only=True)
class _End:
    launch: int
    instruction: str | None = None
    """The instruction in the launch; None for the whole launch."""


def _ends(analysis: Analysis, name: str) -> tuple[_End, ...]:
    """Returns the launches that a name refers to: by number, else by exact name, else by part of a name."""
    if match := re.fullmatch(r"#?(\d+)", name):
        index = int(match[1])
        if index >= len(analysis.launches):
            raise UnknownEdgeError(
                f"no launch #{index}: {analysis.label} has launches #0 to #{len(analysis.launches) - 1}"
            )
        return (_End(launch=index),)
    if exact := [launch.index for launch in analysis.launches if launch.name == name]:
        return tuple(_End(launch=index) for index in exact)
    named = [(decision.producer, decision.producer_launch) for decision in analysis.decisions]
    named += [(decision.consumer, decision.consumer_launch) for decision in analysis.decisions]
    held_in = [(instruction, launch) for instruction, launch in named if launch is not None]
    if held := sorted({launch for instruction, launch in held_in if instruction == name}):
        return tuple(_End(launch=launch, instruction=name) for launch in held)
    if scoped := [launch.index for launch in analysis.launches if launch.scope == name]:
        return tuple(_End(launch=index) for index in scoped)
    part = name.lower()
    found = [
        launch.index
        for launch in analysis.launches
        if any(
            part in text.lower()
            for text in (launch.name, launch.op_name, launch.scope, launch.source or "", *dict(launch.scopes))
        )
        or part in dict(launch.opcodes)
    ] or sorted({launch for instruction, launch in held_in if part in instruction.lower()})
    if found:
        return tuple(_End(launch=index) for index in found)
    known = dict.fromkeys(
        text
        for launch in analysis.launches
        for text in (launch.name, launch.scope, launch.scope.rpartition("/")[2], launch.op_name.rpartition("/")[2])
        if text
    )
    raise UnknownEdgeError(
        f"no launch or instruction of {analysis.label} has {name!r} in its name, op name, scope or source"
        f"{nearest_names(name, known | dict.fromkeys(instruction for instruction, _ in held_in))}"
    )


def _inside(analysis: Analysis, launch: int, sources: Sequence[_End], users: Sequence[_End]) -> Edge:
    """Returns the decisions in a launch: those on the edge itself if there are any, else those at either end."""
    held = [d for d in analysis.decisions if d.producer_launch == d.consumer_launch == launch]
    producers = {end.instruction for end in sources} - {None}
    consumers = {end.instruction for end in users} - {None}
    direct = [d for d in held if d.producer in producers and d.consumer in consumers]
    at = [d for d in held if {d.producer, d.consumer} & (producers | consumers)]
    return Edge(producer=launch, consumer=launch, decisions=_in_order(direct or at or held))


def _in_order(decisions: Iterable[Decision]) -> tuple[Decision, ...]:
    order = {name: place for place, name in enumerate(PASS_ORDER)}
    return tuple(sorted(decisions, key=lambda decision: order.get(decision.pass_name, len(order))))


def _cost(edge: Edge) -> tuple[float, int, int, int]:
    return -(edge.missed.remaining_us if edge.missed else 0.0), -edge.bytes, edge.producer, edge.consumer


def _listed(analysis: Analysis, edges: Sequence[Edge]) -> str:
    shown = [
        f"{_launch(analysis, edge.producer)} → {_launch(analysis, edge.consumer)}"
        for edge in sorted(edges, key=lambda edge: (edge.producer, edge.consumer))[:_SHOWN]
    ]
    return ", ".join(shown) + (f" and {len(edges) - _SHOWN} more" if len(edges) > _SHOWN else "")


def _launch(analysis: Analysis, index: int) -> str:
    return f"#{index} {analysis.launches[index].name}"
