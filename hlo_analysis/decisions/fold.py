"""Replays the steps of priority fusion to find which instructions it fused, and its last verdict on the rest.

A producer that is refused early may be fused later, and one that was priced may then be fused, refused or both. Only
the state at the end of the pass explains the program, so the steps are replayed in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hlo_analysis.decisions.dump import Fused, Priced, Refused, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class LastVerdict:
    """The last verdict of priority fusion on a producer."""

    reason: str | None
    """The rule that forbade fusing the producer, or None if XLA priced it instead."""
    gain_us: float | None
    """XLA's estimated gain: time unfused minus time fused, summed over the increments; None if it was not priced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folded:
    """The state at the end of priority fusion."""

    edges: tuple[Fused, ...]
    """What it fused, in order, with XLA's estimates."""
    verdicts: dict[str, LastVerdict]
    """Maps each producer that the pass looked at to the last verdict on it."""


def fold(steps: Iterable[Step]) -> Folded:
    """Replays the steps: gains add up, and the last verdict on a producer counts.

    XLA prices in increments. A producer waits in the queue while its gain is not negative, and each step adds only what
    changed. A producer whose gain fell below zero leaves the queue, and a fusion that has just grown is new to the
    queue. Both are priced from scratch at the next look (PriorityFusionQueue::CalculateProducerPriority).
    """
    edges: list[Fused] = []
    verdicts: dict[str, LastVerdict] = {}
    grown: set[str] = set()
    for step in steps:
        match step:
            case Fused():
                known = verdicts.get(step.producer)
                edges.append(replace(step, gain_us=known.gain_us if known else None))
                grown.add(step.fusion)
            case Priced():
                gain = step.us_unfused - step.us_fused
                before = verdicts.get(step.producer)
                if before and before.gain_us is not None and before.gain_us >= 0 and step.producer not in grown:
                    gain += before.gain_us
                verdicts[step.producer] = LastVerdict(reason=None, gain_us=round(gain, 6))
                grown.discard(step.producer)
            case Refused():
                verdicts[step.producer] = LastVerdict(reason=step.reason, gain_us=None)
                grown.discard(step.producer)
    return Folded(edges=tuple(edges), verdicts=verdicts)
