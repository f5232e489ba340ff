"""Writes a program's launches as trace events for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from typing import Any, Literal

from hlo_analysis.errors import DumpError
from hlo_analysis.measured.join import run_order
from hlo_analysis.records import Analysis, Launch

Times = Literal["measured", "estimated"]


def trace_events(*analyses: Analysis, times: Times = "measured") -> str:
    """Returns Trace Event JSON of one call of each program: its launches in order, with the mean gap between them.

    Args:
        *analyses: each becomes one process of the trace. With measured times, programs without any are left out.
        times: the duration of a launch: "measured", or "estimated" (`Launch.estimated_us`).

    Raises:
      DumpError: `times` is "measured", and no launch of any program was measured.
    """
    if times == "measured":
        analyses = tuple(each for each in analyses if any(launch.measured_us for launch in each.launches))
        if not analyses:
            raise DumpError("no launch of the program was measured; a trace shows measured times alone")
    events = [event for process, analysis in enumerate(analyses) for event in _program(analysis, process, times)]
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, separators=(",", ":")) + "\n"


def _program(analysis: Analysis, process: int, times: Times) -> list[dict[str, Any]]:
    order = run_order(analysis.launches)
    name = analysis.label if times == "measured" else f"{analysis.label} (estimated)"
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}},
    ]
    now, gap = 0.0, _gap(analysis, len(order), times)
    no_gaps_in_loops = times == "estimated"  # as `Analysis.estimated_us`
    for launch in order:
        duration = launch.measured_us if times == "measured" else launch.estimated_us
        if duration is None:
            continue
        events.append(
            {
                "ph": "X",
                "name": launch.kernel or launch.name,
                "cat": launch.kind,
                "pid": process,
                "tid": 0,
                "ts": round(now, 3),
                "dur": round(duration, 3),
                "args": _arguments(launch),
            }
        )
        now += duration + (0 if no_gaps_in_loops and launch.repeat > 1 else gap)
    return events


def _gap(analysis: Analysis, launches: int, times: Times) -> float:
    if times == "estimated":
        return analysis.device.gap_us
    gaps = analysis.measured.gap_us if analysis.measured is not None else None
    return (gaps or 0.0) / max(1, launches - 1)


def _arguments(launch: Launch) -> dict[str, Any]:
    return {
        "launch": launch.index,
        "scope": launch.scope,
        "source": launch.source or "",
        "estimated_us": round(launch.estimated_us, 3),
        "bytes": launch.bytes_moved,
    }
