"""Ranks strategies by time, by one rule for all views of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hlo_analysis.records import Analysis, Comparison, StrategyResult

_AS_FAST = 0.995
"""A strategy that saves a smaller part of the baseline's time is not called faster."""
_PRODUCT_KINDS = ("cublas", "cublaslt", "cudnn", "triton_gemm")


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Strategies that have an analysis and a time for all of their work, fastest first.

    The times are measured if this program was measured under every strategy, on this GPU. Otherwise all of them are
    estimated: a measured time and an estimate are not compared.
    """

    results: tuple[StrategyResult, ...]
    winner: StrategyResult | None
    """The first, or the baseline if no strategy is faster by 0.5 %; None without two to compare."""
    time_of: Callable[[StrategyResult], float]
    how: str
    """'measured', or 'estimated', for a sentence."""


def ranking(comparison: Comparison) -> Ranking:
    """Ranks the comparison's strategies; one whose estimate omits work (`is_lower_bound`) has no estimated place."""
    base = comparison[comparison.baseline].analysis
    done = [each for each in comparison.strategies if each.analysis is not None]
    if all(each.measured_us is not None for each in done):
        results, time_of, how = done, _measured, "measured"
    else:
        results = [each for each in done if each.analysis and not is_lower_bound(each.analysis, base)]
        time_of, how = _estimated, "estimated"
        if any(each.measured_us is not None for each in done):
            how = "estimated, since not every strategy was measured"
    results = sorted(results, key=time_of)
    baseline = next((each for each in results if each.name == comparison.baseline), None)
    winner = results[0] if len(results) > 1 else None
    if winner and baseline and time_of(winner) >= _AS_FAST * time_of(baseline):
        winner = baseline
    return Ranking(results=tuple(results), winner=winner, time_of=time_of, how=how)


def rival(comparison: Comparison) -> StrategyResult | None:
    """Returns the fastest strategy other than the baseline, to be shown beside it; None if there is no other.

    Only if none has a place in the ranking, the first of the others is taken.
    """
    done = [each for each in comparison.strategies if each.analysis is not None]
    others = (each for each in (*ranking(comparison).results, *done) if each.name != comparison.baseline)
    return next(others, None)


def is_lower_bound(analysis: Analysis, base: Analysis | None) -> bool:
    """Whether roofline and estimate omit matrix products that the baseline counts, those inside opaque kernels."""
    products = () if base is None else (launch for launch in base.launches if launch.kind in _PRODUCT_KINDS)
    counted = sum(launch.flops * launch.repeat for launch in products)
    return analysis.has_opaque_kernels and analysis.traffic.flops < counted / 2


def _measured(result: StrategyResult) -> float:
    assert result.measured_us is not None
    return result.measured_us


def _estimated(result: StrategyResult) -> float:
    assert result.analysis is not None
    return result.analysis.estimated_us
