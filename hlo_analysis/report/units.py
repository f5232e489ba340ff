"""One unit for each column of numbers, so that they can be compared down the column."""

from __future__ import annotations

from dataclasses import dataclass

from hlo_analysis.records import Comparison

_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_MICROSECONDS = (("s", 1e6), ("ms", 1e3))


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A unit, its size, and how many digits follow the point."""

    name: str
    size: float
    digits: int = 2

    def show(self, value: float | None) -> str:
        """The value in this unit, without its name; a dash for None."""
        return "–" if value is None else f"{value / self.size:.{self.digits}f}"


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of a strategy table."""

    traffic: Unit
    memory: Unit
    time: Unit


def units_of(comparison: Comparison) -> Units:
    """Units in which the largest number of each column has one to three digits before the point."""
    done = [(result, result.analysis) for result in comparison.strategies if result.analysis is not None]
    times = [analysis.roofline_us for _, analysis in done]
    times += [result.measured_us for result in comparison.strategies if result.measured_us is not None]
    return Units(
        traffic=_fitting([analysis.traffic.bytes for _, analysis in done], _BYTES, "B"),
        memory=_fitting([analysis.memory.peak_bytes for _, analysis in done], _BYTES, "B"),
        time=_fitting(times, _MICROSECONDS, "µs"),
    )


def _fitting(values: list[float] | list[int], units: tuple[tuple[str, float], ...], least: str) -> Unit:
    largest = max(values, default=0)
    name, size = next(((name, size) for name, size in units if largest >= size), (least, 1.0))
    whole = name == least and least == "B"
    return Unit(name=name, size=size, digits=0 if whole else 2 if largest < 100 * size else 1)
