"""Formats numbers: each with its own unit, or all of a table's column in one unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hlo_analysis.records import Comparison

_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_MICROSECONDS = (("s", 1e6), ("ms", 1e3))
_FLOPS = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3))


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A unit: its name, its size, and the number of decimals."""

    name: str
    size: float
    digits: int = 2

    def show(self, value: float | None) -> str:
        """Formats the value in this unit, without the unit's name; None becomes a dash."""
        return "–" if value is None else f"{value / self.size:.{self.digits}f}"


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of a strategy table."""

    traffic: Unit
    memory: Unit
    time: Unit


def units_of(comparison: Comparison) -> Units:
    """Chooses units in which each column's largest number has one to three digits before the decimal point."""
    done = [(result, result.analysis) for result in comparison.strategies if result.analysis is not None]
    times = [analysis.roofline_us for _, analysis in done]
    times += [time for result in comparison.strategies for time in (result.measured_us, result.wall_us) if time]
    return Units(
        traffic=_fitting([analysis.traffic.bytes for _, analysis in done], _BYTES, "B"),
        memory=_fitting([analysis.memory.peak_bytes for _, analysis in done], _BYTES, "B"),
        time=_fitting(times, _MICROSECONDS, "µs"),
    )


def _fitting(values: Iterable[float], units: Sequence[tuple[str, float]], least: str) -> Unit:
    largest = max(values, default=0)
    name, size = _unit(largest, units, least)
    digits = 0 if name == "B" else 2 if largest < 100 * size else 1
    return Unit(name=name, size=size, digits=digits)


def _unit(value: float, units: Sequence[tuple[str, float]], least: str) -> tuple[str, float]:
    """Returns the largest unit of which a value has at least one, with its size."""
    return next(((name, size) for name, size in units if abs(value) >= size), (least, 1.0))


def format_bytes(count: float) -> str:
    """Formats bytes as '1.2 MB', in decimal units as memory bandwidths are quoted."""
    name, size = _unit(count, _BYTES, "B")
    digits = 0 if name == "B" or abs(count) >= 100 * size else 1
    return f"{count / size:.{digits}f} {name}"


def format_us(microseconds: float) -> str:
    """Formats a time with its unit: '850 µs', '5.53 ms', '1.20 s'."""
    name, size = _unit(microseconds, _MICROSECONDS, "µs")
    digits = 2 if size > 1 else 0 if abs(microseconds) >= 10 else 1
    return f"{microseconds / size:.{digits}f} {name}"


def format_flops(count: float) -> str:
    """Formats floating-point operations: '1.1 TFLOP'."""
    name, size = _unit(count, _FLOPS, "FLOP")
    return f"{count / size:.{int(size > 1)}f} {name}"


def format_change(value: float, base: float) -> str:
    """Formats the difference in percent: '−12%', '+3%'; '=' if equal, '' if the base is 0."""
    if value == base:
        return "="
    if not base:
        return ""
    percent = (value / base - 1) * 100
    digits = 0 if abs(percent) >= 10 else 1
    text = f"{abs(percent):.{digits}f}%"
    return "≈" if float(text[:-1]) == 0 else ("−" if percent < 0 else "+") + text


def plural(count: int, word: str) -> str:
    """Formats a count: '1 launch', '2 launches'."""
    if count == 1:
        return f"1 {word}"
    return f"{count} {word}es" if word.endswith(("ch", "s", "sh")) else f"{count} {word}s"


def enumerated(names: Sequence[str]) -> str:
    """Joins names: 'a', 'a and b', 'a, b and c'."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
