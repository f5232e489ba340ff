"""Describes measured times: their source, and models of time that are far off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hlo_analysis.records import Analysis, Comparison, Launch
from hlo_analysis.report.formats import format_bytes, format_us

FAR_OFF = 2.0
"""A model's time is reported if it is too small or too large by this factor."""


def measured_sentences(comparison: Comparison) -> list[tuple[tuple[str, ...], str]]:
    """Returns sentences on the measured times, each with the strategies that it concerns, or () for all."""
    done = [(each.name, each.analysis) for each in comparison.strategies if each.analysis is not None]
    found: dict[str, list[str]] = {}
    for name, analysis in done:
        if analysis.measured is not None:
            for sentence in (_origin(analysis), *analysis.measured.notes):
                found.setdefault(sentence, []).append(name)
    sentences = [(() if len(names) == len(done) else tuple(names), text) for text, names in found.items()]
    about = [(name, text) for name, analysis in done for text in (*_beside(analysis), *_far_off(analysis))]
    return sentences + [((name,), f"{name}: {text}") for name, text in about]


def _origin(analysis: Analysis) -> str:
    measured = analysis.measured
    assert measured is not None
    said = ", ".join(filter(None, (measured.source, measured.created[:10])))
    if measured.differs:
        what = measured.differs[0].upper() + measured.differs[1:]
        return f"{what}: measured on an {measured.device} ({said}), and no time of this program."
    wall = ", and wall clock of a call" if measured.wall_us is not None else ""
    return f"Measured on an {measured.device} ({said}): GPU time of all kernels{wall}."


def _beside(analysis: Analysis) -> list[str]:
    """Describes the other measurements: gaps, compile time and memory."""
    measured = analysis.measured
    if measured is None or measured.differs:
        return []
    said = []
    if measured.gap_us is not None:
        each = measured.gap_us / max(1, analysis.launch_count - 1)
        said.append(f"{format_us(measured.gap_us)} of gaps between its launches, {each:.1f} µs each")
    if measured.compile_seconds is not None:
        said.append(f"compiled in {measured.compile_seconds:.1f} s")
    if measured.peak_bytes is not None:
        said.append(f"{format_bytes(measured.peak_bytes)} at most in memory")
    return [f"{', '.join(said)}."] if said else []


def _far_off(analysis: Analysis) -> list[str]:
    models: Sequence[tuple[str, Callable[[Launch], float | None]]] = (
        ("the estimate", lambda launch: launch.estimated_us),
        ("XLA's estimate", lambda launch: launch.xla_estimate_us),
    )
    timed = [(launch, launch.measured_us) for launch in analysis.launches if launch.measured_us]
    sentences: list[str] = []
    for model, estimate in models:
        known = [(launch, measured, each) for launch, measured in timed if (each := estimate(launch))]
        off = [item for item in known if not 1 / FAR_OFF <= item[2] / item[1] <= FAR_OFF]
        if off:
            launch, measured, each = max(off, key=lambda item: abs(item[1] - item[2]) * item[0].repeat)
            share = sum(us * far.repeat for far, us, _ in off) / sum(us * each.repeat for each, us in timed)
            sentences.append(
                f"{model} of {len(off)} of {len(known)} launches is more than {FAR_OFF:g}× off, {share:.0%} of the "
                f"measured time; the most in #{launch.index} {launch.name}, {format_us(measured)} measured and "
                f"{format_us(each)} estimated."
            )
    return sentences
