"""Folds the steps of priority fusion into what became of each instruction, and the last verdict on the rest.

A producer that is refused early may be fused later, and one that is priced may be fused, refused or both afterwards:
only the state at the end of the pass explains the program. So the steps are replayed in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hlo_analysis.decisions.dump import Fused, Priced, Refused, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedEdge:
    """Two instructions that priority fusion put together: `producer` went into `consumer`, giving `fusion`."""

    producer: str
    consumer: str
    fusion: str
    gain_us: float | None
    """Estimated by XLA when it chose the edge, over all users of the producer; None for bitcasts, never priced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """The last that priority fusion said about a producer."""

    reason: str | None
    """The rule that forbade it, or None where it was priced."""
    gain_us: float | None
    """Estimated by XLA: time unfused less time fused, summed over the increments; None where it was not priced."""
    consumers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Folded:
    """The state at the end of priority fusion."""

    members: dict[str, frozenset[str]]
    """Fusion → the instructions of the module before the pass that it holds."""
    edges: tuple[FusedEdge, ...]
    words: dict[str, Word]
    """Producer → last word, for every producer that the pass ever looked at."""


def fold(steps: Iterable[Step]) -> Folded:
    """Replay the steps: members[fusion] = members[producer] ∪ members[consumer], gains summed, last word kept.

    XLA prices in increments: while a producer's gain is not negative it waits in the queue, and a step adds only what
    changed. A producer whose gain fell below zero leaves the queue, and a fusion that has just grown is new to it:
    both are priced afresh at their next look (PriorityFusionQueue::CalculateProducerPriority).
    """
    members: dict[str, frozenset[str]] = {}
    edges: list[FusedEdge] = []
    words: dict[str, Word] = {}
    grown: set[str] = set()
    for step in steps:
        match step:
            case Fused():
                known = words.get(step.producer)
                gain = known.gain_us if known else None
                edges.append(
                    FusedEdge(producer=step.producer, consumer=step.consumer, fusion=step.fusion, gain_us=gain)
                )
                producer = members.get(step.producer, frozenset((step.producer,)))
                consumer = members.get(step.consumer, frozenset((step.consumer,)))
                members[step.fusion] = producer | consumer
                grown.add(step.fusion)
            case Priced():
                gain = step.us_unfused - step.us_fused
                before = words.get(step.producer)
                if before and before.gain_us is not None and before.gain_us >= 0 and step.producer not in grown:
                    gain += before.gain_us
                words[step.producer] = Word(reason=None, gain_us=round(gain, 6), consumers=step.consumers)
                grown.discard(step.producer)
            case Refused():
                words[step.producer] = Word(reason=step.reason, gain_us=None)
                grown.discard(step.producer)
    return Folded(members=members, edges=tuple(edges), words=words)
