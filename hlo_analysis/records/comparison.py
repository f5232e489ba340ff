"""Strategies for one program, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field

from hlo_analysis.records.analysis import SCHEMA_VERSION, Analysis
from hlo_analysis.records.launches import Phase


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Largest error against a float64 reference, beside the baseline's in the same dtype, at a small size."""

    shape: str
    dtype: str
    error: float
    baseline_error: float
    passed: bool
    """error <= 2 * baseline_error + one ulp."""
    note: str = ""
    """What was run to find this out, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """One strategy's analysis, or the error that kept it from one."""

    name: str
    description: str
    analysis: Analysis | None
    error: str | None = None
    numerics: Numerics | None = None

    @property
    def measured_us(self) -> float | None:
        """Measured: GPU time of all kernels of one call; None where no GPU ran it."""
        measured = None if self.analysis is None else self.analysis.measured
        return None if measured is None else measured.kernel_us

    @property
    def wall_us(self) -> float | None:
        """Measured: wall clock of one call; None where no GPU ran it, or nobody looked at the clock."""
        measured = None if self.analysis is None else self.analysis.measured
        return None if measured is None else measured.wall_us


@dataclass(frozen=True, kw_only=True)
class ScopeCell:
    """What one strategy launches for one scope and phase."""

    strategy: str
    launches: tuple[int, ...]
    bytes: int
    roofline_us: float
    fused_into: tuple[int, ...] = ()
    """Launches counted under another scope that hold instructions of this one: their bytes are not in this cell."""


@dataclass(frozen=True, kw_only=True)
class ScopeRow:
    """One scope of the model across strategies."""

    scope: str
    phase: Phase
    cells: tuple[ScopeCell, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Strategies on one program, aligned by the model's named scopes."""

    schema_version: int = SCHEMA_VERSION
    title: str
    baseline: str
    strategies: tuple[StrategyResult, ...]
    rows: tuple[ScopeRow, ...] = field(default=())
    unfused: str | None = None
    """The strategy that fuses nothing, where it has an analysis. What fusion saves is counted against its traffic."""

    def saved_bytes(self, name: str) -> int | None:
        """HBM traffic of `unfused` less that of a strategy; None where one of them has no analysis."""
        ours = self[name].analysis
        unfused = None if self.unfused is None else self[self.unfused].analysis
        return None if ours is None or unfused is None else unfused.traffic.bytes - ours.traffic.bytes

    def saved_share(self, name: str) -> float | None:
        """`saved_bytes` over the traffic of `unfused`."""
        saved = self.saved_bytes(name)
        ours = self[name].analysis
        return None if saved is None or ours is None else saved / max(1, saved + ours.traffic.bytes)

    def __repr__(self) -> str:
        names = ", ".join(s.name if s.analysis else f"{s.name} (no analysis)" for s in self.strategies)
        return f"Comparison({self.title!r}, baseline {self.baseline}: {names}; {len(self.rows)} scopes)"

    def __getitem__(self, name: str) -> StrategyResult:
        for strategy in self.strategies:
            if strategy.name == name:
                return strategy
        raise KeyError(f"no strategy {name!r} in this comparison; it has {[s.name for s in self.strategies]}")
