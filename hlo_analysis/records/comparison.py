"""Defines the comparison of several strategies for one program."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import shorten
from typing import Literal

from hlo_analysis.records.analysis import SCHEMA_VERSION, Analysis
from hlo_analysis.records.launches import Phase


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The largest error against a float64 reference at a small size, and the baseline's error in the same dtype."""

    shape: str
    dtype: str
    error: float
    baseline_error: float
    passed: bool
    """error <= 2 * baseline_error + one ulp."""
    note: str = ""
    """What was run to find the errors, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class SiteRecord:
    """A site in the program that computes, or almost computes, what a fused operation does."""

    operation: str
    source: str
    """'file.py:line' in the user's program, where known."""
    outcome: Literal["taken", "left to XLA", "refused"]
    """'left to XLA': the operation would run by XLA, and the program stays as it is written."""
    implementation: str = ""
    """The implementation that the operation runs; '' for a site that is not taken."""
    reason: str = ""
    """Why the site was refused or left to XLA; or how, taken, it makes the program worse."""


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """One strategy's analysis, or the error that prevented one."""

    name: str
    description: str
    analysis: Analysis | None
    error: str | None = None
    numerics: Numerics | None = None
    call: str = ""
    """Python that runs the program in this way, e.g. 'jax.jit(xlafuse.fuse(loss))'; '' if no code says it."""
    sites: tuple[SiteRecord, ...] = ()
    """For a strategy that rewrites the program: the sites where it put fused operations, and those it left."""

    def __repr__(self) -> str:
        return f"StrategyResult({self.name!r}, {self.analysis or shorten(f'no analysis: {self.error}', 80)})"

    @property
    def measured_us(self) -> float | None:
        """Returns the measured GPU time of all kernels of one call, or None if no such GPU ran this program."""
        measured = None if self.analysis is None else self.analysis.measured
        return None if measured is None or measured.differs else measured.kernel_us

    @property
    def wall_us(self) -> float | None:
        """Returns the measured wall-clock time of one call, or None if it was not measured of this program."""
        measured = None if self.analysis is None else self.analysis.measured
        return None if measured is None or measured.differs else measured.wall_us


@dataclass(frozen=True, kw_only=True)
class ScopeCell:
    """The launches of one strategy for one scope and phase."""

    strategy: str
    launches: tuple[int, ...]
    bytes: int
    roofline_us: float
    fused_into: tuple[int, ...] = ()
    """Launches of other scopes that also contain instructions of this scope; this cell does not count their bytes."""


@dataclass(frozen=True, kw_only=True)
class ScopeRow:
    """One scope of the model across strategies."""

    scope: str
    """The source line of launches that have no scope; '' where that is unknown too."""
    phase: Phase
    cells: tuple[ScopeCell, ...]

    def __repr__(self) -> str:
        launches = ", ".join(f"{cell.strategy} {len(cell.launches)}" for cell in self.cells[:6])
        return f"ScopeRow({self.scope!r}, {self.phase}, launches: {launches}{', …' if len(self.cells) > 6 else ''})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several strategies for one program, aligned by the model's named scopes."""

    schema_version: int = SCHEMA_VERSION
    title: str
    baseline: str
    strategies: tuple[StrategyResult, ...]
    rows: tuple[ScopeRow, ...] = field(default=())
    unfused: str | None = None
    """The strategy that fuses nothing, if it has an analysis. Savings are counted against its traffic."""

    def saved_bytes(self, name: str) -> int | None:
        """Returns the HBM traffic of `unfused` minus that of a strategy; None if one of them has no analysis."""
        ours = self[name].analysis
        unfused = None if self.unfused is None else self[self.unfused].analysis
        return None if ours is None or unfused is None else unfused.traffic.bytes - ours.traffic.bytes

    def saved_share(self, name: str) -> float | None:
        """Returns `saved_bytes` divided by the traffic of `unfused`."""
        saved = self.saved_bytes(name)
        ours = self[name].analysis
        return None if saved is None or ours is None else saved / max(1, saved + ours.traffic.bytes)

    def __repr__(self) -> str:
        names = ", ".join(s.name if s.analysis else f"{s.name} (no analysis)" for s in self.strategies)
        return f"Comparison({self.title!r}, baseline {self.baseline}: {names}; {len(self.rows)} scopes)"

    def _repr_html_(self) -> str:
        """Returns the verdict and the strategy table, which a notebook shows for a Comparison."""
        from hlo_analysis.report.notebook import render_notebook

        return render_notebook(self)

    def to_html(self) -> str:
        """Returns the page that `xlafuse report` writes, one file that needs no network."""
        from hlo_analysis.report import render_html

        return render_html(self)

    def to_markdown(self) -> str:
        """Returns what to do, where the time goes and the strategies as Markdown, for an issue."""
        from hlo_analysis.report import render_markdown

        return render_markdown(self)

    def __getitem__(self, name: str) -> StrategyResult:
        for strategy in self.strategies:
            if strategy.name == name:
                return strategy
        raise KeyError(f"no strategy {name!r} in this comparison; it has {[s.name for s in self.strategies]}")
