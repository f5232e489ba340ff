"""Adds the measurements of a capture that ran its program (`capture(measure=True)`) to the analysis."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles

from hlo_analysis.capture import Capture
from hlo_analysis.errors import DumpError
from hlo_analysis.measured.join import join, with_measured
from hlo_analysis.measured.profile import read_profile
from hlo_analysis.records import Analysis, Measured

_SLOW_CLOCK = 0.93
"""As a share of the highest clock. An H200 at work under its power limit stays above it."""
_UNSTEADY = 1.2


def measured_run(analysis: Analysis, capture: Capture) -> Analysis:
    """Returns the analysis with the capture's measurements, or unchanged if the capture only compiled."""
    text = capture.text("run")
    if text is None:
        return analysis
    run = json.loads(text)
    if "error" in run:
        return analysis.with_notes(f"Not measured: the program failed as it ran: {run['error']}")
    provenance = analysis.provenance
    gpu: Mapping[str, str] = run["gpu"]
    measured = Measured(
        device=run["device"],
        source="a profiled run" + (f" of {count} devices" if (count := run["devices"]) > 1 else ""),
        created=provenance.created,
        calls=0,
        kernel_us=None,
        wall_us=median(run["walls_us"]),
        compile_seconds=run["compile_seconds"],
        peak_bytes=run["peak_bytes"],
        environment=(*provenance.versions, *gpu.items()),
        notes=(*_slow_clock(gpu), *_unsteady(run["walls_us"])),
    )
    profile = capture.file("profile")
    try:
        if profile is None:
            raise DumpError(run.get("profile_error") or "the profiler wrote nothing")
        joined = join(analysis, *read_profile(profile))
        measured = replace(
            measured,
            calls=joined.calls,
            kernel_us=joined.kernel_us,
            gap_us=joined.gap_us,
            launches=joined.launches,
            notes=(*measured.notes, *joined.notes),
        )
    except DumpError as error:
        note = f"Only the wall clock was measured: {str(error).replace(str(profile), 'the profile')}."
        measured = replace(measured, notes=(*measured.notes, note))
    return with_measured(analysis, measured)


def _unsteady(walls: Sequence[float]) -> tuple[str, ...]:
    low, *_, high = quantiles(walls, n=5)
    if high <= _UNSTEADY * low:
        return ()
    return (f"The wall clock of a call went from {low:.0f} to {high:.0f} us (p20, p80): does another use the GPU?",)


def _slow_clock(gpu: Mapping[str, str]) -> tuple[str, ...]:
    """Warns if the GPU's clock was lowered during the run."""
    try:
        clock, most = float(gpu["sm_clock_mhz"]), float(gpu["max_sm_clock_mhz"])
        power, limit = float(gpu["power_watts"]), float(gpu["power_limit_watts"])
    except (KeyError, ValueError):  # no nvidia-smi, or "[N/A]"
        return ()
    if clock >= _SLOW_CLOCK * most:
        return ()
    # nvidia-smi gives the mean power over one second, more than half of it before the run.
    return (f"The GPU's clock was lowered to {clock:.0f} of {most:.0f} MHz ({power:.0f} of {limit:.0f} W).",)
