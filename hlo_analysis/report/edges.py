"""Formats edges between launches as plain text: the work of both ends, XLA's decisions, the cost, the remedy."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hlo_analysis.decisions.categories import OTHER_RULE
from hlo_analysis.decisions.explanations import plain_reason
from hlo_analysis.explain import Edge, apart_because
from hlo_analysis.records import Analysis, Decision, Launch, MissedFusion, Trial
from hlo_analysis.report.formats import format_bytes, format_flops, format_us, plural

_OPCODES = 6
_DECISIONS = 12


def edge_list(analysis: Analysis, edges: Sequence[Edge], count: int = 10) -> list[str]:
    """Lists the first `count` edges, numbered; edges of one missed fusion form one entry."""
    if not edges:
        return ["No value goes from one launch to another."]
    entries: dict[object, list[Edge]] = {}
    for edge in edges:
        key = edge.missed.rank if edge.missed else (edge.producer, edge.consumer)
        entries.setdefault(key, []).append(edge)
    shown = "The" if count >= len(entries) else f"The costliest {count} of the"
    lines = [f"{shown} {plural(len(entries), 'value')} between launches, by the time at stake and the size:"]
    for place, (edge, *others) in enumerate(list(entries.values())[:count], start=1):
        readers = ", ".join(_name(analysis.launches[each.consumer]) for each in (edge, *others))
        stake = f", {format_us(edge.missed.remaining_us)} at stake (estimated)" if edge.missed else ""
        lines += [
            f"{place:>3}. {_name(analysis.launches[edge.producer])} → {readers}",
            f"     {format_bytes(edge.bytes)}{stake}",
            *_because(analysis, edge),
        ]
    return [*lines, "`xlafuse explain PRODUCER CONSUMER` tells the story of one."]


def edge_record(analysis: Analysis, edge: Edge) -> dict[str, Any]:
    """Returns an edge as plain values: both launches, why they are apart, XLA's decisions, the cost and the remedy."""
    because, *words = (line.strip() for line in _because(analysis, edge))
    return {
        "producer": {"index": edge.producer, "name": analysis.launches[edge.producer].name},
        "consumer": {"index": edge.consumer, "name": analysis.launches[edge.consumer].name},
        "bytes": edge.bytes,
        "because": because,
        "words": words[0] if words else because,
        "decisions": [asdict(decision) for decision in edge.decisions],
        "missed": None if edge.missed is None else asdict(edge.missed),
    }


def edge_story(analysis: Analysis, edge: Edge) -> list[str]:
    """Describes one edge in full."""
    producer, consumer = analysis.launches[edge.producer], analysis.launches[edge.consumer]
    if producer is consumer:
        head = [f"{_name(producer)} holds both ends.", "", *_work("launch", producer)]
    else:
        value = edge.missed.shape if edge.missed else next((d.shape for d in edge.decisions), "")
        went = f"{value}, {format_bytes(edge.bytes)}, goes" if edge.bytes else "A value goes"
        head = [
            f"{_name(producer)} → {_name(consumer)}",
            f"{went} from one to the other through {analysis.device.memory_name}.",
            *(line.strip() for line in _because(analysis, edge)[:1]),
            "",
            *_work("producer", producer),
            *_work("consumer", consumer),
        ]
    return [*head, "", *_decisions(edge), *_at_stake(edge.missed)]


def _because(analysis: Analysis, edge: Edge) -> list[str]:
    """Says in plain words why the ends are apart, then in the compiler's."""
    said = apart_because(edge)
    decision = next((each for each in reversed(edge.decisions) if each.verdict != "fused"), edge.missed)
    if decision is None or decision.category == OTHER_RULE:
        return [f"     {said}"]
    plain = plain_reason(decision.category, analysis.launches[edge.producer], analysis.launches[edge.consumer])
    return [f"     {plain}", f"     {said}"]


def _name(launch: Launch) -> str:
    return f"#{launch.index} {launch.name}"


def _work(role: str, launch: Launch) -> list[str]:
    opcodes = [f"{opcode} ×{count}" if count > 1 else opcode for opcode, count in launch.opcodes[:_OPCODES]]
    more = len(launch.opcodes) - _OPCODES
    computes = ", ".join(opcodes) + (f" and {plural(more, 'opcode')} more" if more > 0 else "")
    where = " · ".join(filter(None, (launch.source, launch.scope, launch.op_name)))
    times = f", runs {launch.repeat} times" if launch.repeat > 1 else ""
    return [
        f"{role:<9} {_name(launch)} ({launch.kind}{times})",
        *([f"          computes {computes}"] if computes else []),
        f"          {format_bytes(launch.bytes_read)} read, {format_bytes(launch.bytes_written)} written, "
        f"{format_flops(launch.flops)} (counted); {format_us(launch.estimated_us)} (estimated)",
        *_sent(launch),
        *([f"          at {where}"] if where else []),
    ]


def _sent(launch: Launch) -> list[str]:
    if not launch.link_bytes:
        return []
    over = f" over {', '.join(f'{name}={size}' for name, size in launch.axes)}" if launch.axes else ""
    alone = "" if launch.exposed_us is None else f"; {format_us(launch.exposed_us)} beside no other work (estimated)"
    return [f"          sends {format_bytes(launch.link_bytes)}{over} (counted){alone}"]


def _decisions(edge: Edge) -> list[str]:
    if not edge.decisions:
        return ["XLA's decisions: no pass recorded one for this edge."]
    lines = ["XLA's decisions, in the order of its passes:"]
    for place, decision in enumerate(edge.decisions[:_DECISIONS], start=1):
        lines += [f"{place:>3}. {_decision(decision)}", *_wrapped(decision.reason, 5)]
    left = len(edge.decisions) - _DECISIONS
    return [*lines, *([f"     and {left} more"] if left > 0 else [])]


def _decision(decision: Decision) -> str:
    gain = ""
    if decision.gain_us is not None:
        gain = f", gain {decision.gain_us:+.2f} µs (XLA's estimate)"
    return (
        f"{decision.pass_name or 'no pass'}: {decision.verdict} [{decision.category}]{gain}: "
        f"{decision.producer} → {decision.consumer}"
    )


def _at_stake(missed: MissedFusion | None) -> list[str]:
    if missed is None:
        return []
    kernel = f" ({missed.kernel})" if missed.kernel else ""
    lines = [
        "",
        f"At stake: {format_bytes(missed.bytes_at_stake)} of HBM traffic (counted), "
        f"{format_us(missed.time_at_stake_us)} alone and {format_us(missed.remaining_us)} after the missed fusions "
        f"ranked above it (estimated). Rank {missed.rank}.",
        f"Remedy, {missed.remedy_kind}{kernel}:",
        *_wrapped(missed.remedy, 2),
    ]
    if missed.options:
        lines += [f"  option {name}={value}" for name, value in missed.options]
    if missed.code:
        lines += ["", *(f"    {line}" for line in missed.code.splitlines())]
    return [*lines, *([_trial(missed.trial)] if missed.trial else [])]


def _trial(trial: Trial) -> str:
    if trial.error:
        return f"Tried, and it failed: {trial.change}: {trial.error}"
    effect = (
        f"{plural(trial.saved_launches, 'launch')} and {format_bytes(trial.saved_bytes)} less (counted), "
        f"{format_us(trial.saved_us)} less (estimated)"
    )
    return f"Tried: {trial.change}: {effect}; it {'helps' if trial.helps else 'does not help'}."


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=" " * indent, subsequent_indent=" " * indent) or [""]
