"""Hotspots: launches that take longer than they need, grouped by cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hlo_analysis.records.edges import Trial


@dataclass(frozen=True, kw_only=True)
class Hotspot:
    """Launches whose time above what they need has one cause, and what to do about it. Times are of one run."""

    launches: tuple[int, ...]
    """Launches whose whole time above their need counts here; each launch is in one hotspot."""
    missed: tuple[int, ...] = ()
    """Ranks of the missed fusions that count here."""
    cause: str
    needed_us: float = 0.0
    """Estimated: what `launches` need, by their bytes and matrix products at the rates of the best kernels."""
    stake_us: float = 0.0
    """Estimated: what the missed fusions have at stake (`MissedFusion.remaining_us`), beside the launches' excess."""
    scope: str = ""
    source: str | None = None
    time_us: float = 0.0
    """Measured or estimated: of `launches`, and of the launches on both ends of the missed fusions."""
    excess_us: float = 0.0
    """The part of `time_us` that is not needed: of `launches` what is above `needed_us`, and `stake_us`."""
    how: Literal["measured", "estimated"] = "estimated"
    most_us: float | None = None
    """Estimated: the time of `launches` where most updates of a scatter fall into one row, which their number makes
    likely; without a measured time, `time_us` is between that and the estimate. None where the data decides little."""
    waits_for_host: bool = False
    """Whether the GPU waits for Python: a time that is in no other number here."""
    remedy_kind: Literal["option", "rewrite", "kernel", ""] = ""
    """As for a missed fusion; '' if nothing is known to help."""
    remedy: str = ""
    options: tuple[tuple[str, str], ...] = ()
    kernel: str | None = None
    code: str = ""
    trial: Trial | None = None

    def __repr__(self) -> str:
        return (
            f"Hotspot({self.excess_us:.1f} of {self.time_us:.1f} us {self.how}, {len(self.launches)} launches: "
            f"{self.cause!r})"
        )
