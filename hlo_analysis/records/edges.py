"""Defines the records of edges between launches: XLA's decisions, intermediate values, and missed fusions."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import shorten
from typing import Literal

Verdict = Literal["fused", "rejected", "ineligible", "unrecorded"]
"""XLA's verdict on an edge.

fused: one launch contains both ends. rejected: XLA's cost model said no. ineligible: a rule forbade it.
unrecorded: two launches, and no pass recorded a reason.
"""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One producer-consumer edge: whether it was fused, and the reason that the compiler recorded."""

    producer: str
    consumer: str
    """Names in the final module if both still exist there, otherwise names at the time of the decision."""
    verdict: Verdict
    reason: str
    """The compiler's own words, or ours in brackets if it gave none."""
    category: str
    """A short group, e.g. 'cost model: fusing is slower', 'library call', 'multiple consumers'."""
    pass_name: str
    gain_us: float | None = None
    """XLA's estimate at the pass's last look: time unfused minus time fused; negative if fusing would be slower."""
    producer_launch: int | None = None
    consumer_launch: int | None = None
    bytes: int = 0
    """Size of the value on the edge."""
    shape: str = ""
    scope: str = ""

    def __repr__(self) -> str:
        gain = "" if self.gain_us is None else f", gain {self.gain_us:.1f} us"
        ends = f"{shorten(self.producer, 32, placeholder='…')} → {shorten(self.consumer, 32, placeholder='…')}"
        by = f" by {self.pass_name}" if self.pass_name else ""
        return f"Decision({ends}, {self.verdict}{by}{gain}: {shorten(self.reason, 50, placeholder='…')!r})"


@dataclass(frozen=True, kw_only=True)
class Intermediate:
    """A value that one launch writes to HBM and another reads."""

    name: str
    shape: str
    bytes: int
    producer: int
    consumers: tuple[int, ...]
    bytes_moved: int
    """Written once, and read once per consumer, times `repeat`."""
    required_bytes: int = 0
    """The part of them that moves in any case: the program returns the value, so it is written once."""

    @property
    def avoidable_bytes(self) -> int:
        """Returns the bytes that would not move if one launch held the value's producer and consumers."""
        return self.bytes_moved - self.required_bytes

    def __repr__(self) -> str:
        readers = _numbers(self.consumers)
        return f"Intermediate({self.name!r}, {self.shape}, #{self.producer} → {readers}: {self.bytes_moved:,} bytes)"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The effect of a remedy: the program compiled again with it, compared with the program as it is.

    Differences are savings: positive if the remedy reduces the number.
    """

    change: str
    """The change to the program, e.g. 'compiler option NAME=VALUE' or 'rms_norm by xlafuse.fuse'."""
    saved_launches: int = 0
    """Counted, for one run."""
    saved_bytes: int = 0
    """Counted: HBM traffic of one run."""
    saved_us: float = 0.0
    """Estimated: time of one run (`Analysis.estimated_us`)."""
    helps: bool = False
    error: str = ""
    """Why the remedy could not be tried; '' if it was."""


@dataclass(frozen=True, kw_only=True)
class MissedFusion:
    """An intermediate that need not reach HBM, ranked by the time still at stake once those above it are fixed."""

    rank: int
    value: str
    shape: str
    producer: int
    consumers: tuple[int, ...]
    bytes_at_stake: int
    time_at_stake_us: float
    """Estimated time saved if only this one is fixed: less waiting for memory in the launches on both ends (none in
    launches that arithmetic bounds, but for what an expanded grouped product multiplies by zeros), and the launch
    overhead that goes away.
    """
    remaining_us: float = 0.0
    """Estimated: the part of `time_at_stake_us` that is left once those ranked above are fixed. A launch's time and its
    overhead count once, so the sum over all missed fusions is at most the program's time.
    """
    share: float
    """Bytes at stake as a share of the traffic of the launches on both ends: the fusion test."""
    reason: str
    category: str
    remedy_kind: Literal["option", "rewrite", "kernel"]
    remedy: str
    scope: str = ""
    source: str | None = None
    """'file.py:line' of the innermost user frame of its launches; None if unknown."""
    options: tuple[tuple[str, str], ...] = ()
    """For an option: XLA's compiler options and their values."""
    kernel: str | None = None
    """For a kernel: its name in the catalogue, or None if the catalogue has none."""
    code: str = ""
    """Python code that applies the remedy, to copy; '' if there is no general form."""
    trial: Trial | None = None
    """The remedy's effect; None if it was not tried."""

    def __repr__(self) -> str:
        readers = _numbers(self.consumers)
        return (
            f"MissedFusion({self.rank}. {self.value!r}, #{self.producer} → {readers}: {self.bytes_at_stake:,} bytes, "
            f"{self.remaining_us:.1f} us; {self.remedy_kind}: {shorten(self.remedy, 50, placeholder='…')!r})"
        )


def _numbers(launches: tuple[int, ...]) -> str:
    """Lists launches as '#1, #2, #5, #7, …'."""
    return ", ".join([*(f"#{index}" for index in launches[:4]), *(["…"] if len(launches) > 4 else [])])
