"""Records of what lies between launches: XLA's decisions, intermediate values, and missed fusions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fused", "rejected", "ineligible", "unrecorded"]
"""fused: one launch holds both ends. rejected: XLA's cost model said no. ineligible: a rule forbade it.
unrecorded: two launches, and no pass left a word about the edge."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One producer-consumer edge: fused or not, and the reason that the compiler recorded."""

    producer: str
    consumer: str
    """Names in the final module where both still exist, otherwise names at the time of the decision."""
    verdict: Verdict
    reason: str
    """The compiler's own words, or ours in brackets where it left none."""
    category: str
    """A short group, e.g. 'cost model: fusing is slower', 'library call', 'multiple consumers'."""
    pass_name: str
    gain_us: float | None = None
    """Estimated by XLA: time unfused less time fused, as the pass saw it at its last look; negative: it would lose."""
    producer_launch: int | None = None
    consumer_launch: int | None = None
    bytes: int = 0
    """Size of the value on the edge."""
    shape: str = ""
    scope: str = ""


@dataclass(frozen=True, kw_only=True)
class Intermediate:
    """A value that one launch writes to HBM for another to read."""

    name: str
    shape: str
    bytes: int
    producer: int
    consumers: tuple[int, ...]
    bytes_moved: int
    """Written once, read once per consumer (times `repeat`)."""


@dataclass(frozen=True, kw_only=True)
class MissedFusion:
    """An intermediate that need not reach HBM, ranked by what it costs."""

    rank: int
    value: str
    shape: str
    producer: int
    consumers: tuple[int, ...]
    bytes_at_stake: int
    time_at_stake_us: float
    """Estimated: how much less the launches on both ends would wait for memory (one that arithmetic bounds waits for
    none of it), and the launch overhead that would go."""
    share: float
    """Bytes at stake as a share of the traffic of the launches on both ends: the fusion test."""
    reason: str
    category: str
    remedy_kind: Literal["option", "rewrite", "kernel"]
    remedy: str
    scope: str = ""
