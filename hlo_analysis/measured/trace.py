"""A measured program as trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from hlo_analysis.errors import DumpError
from hlo_analysis.measured.join import run_order
from hlo_analysis.records import Analysis


def trace_events(*analyses: Analysis) -> str:
    """Trace Event JSON of one call of each program: its launches one after another, each as long as it was measured.

    The gaps between launches are the mean one. A program of which no launch was measured is left out.

    Raises:
      DumpError: no launch of any of them was measured.
    """
    measured = [analysis for analysis in analyses if any(launch.measured_us for launch in analysis.launches)]
    if not measured:
        raise DumpError("no launch of the program was measured; a trace shows measured times alone")
    events = [event for process, analysis in enumerate(measured) for event in _program(analysis, process)]
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, separators=(",", ":")) + "\n"


def _program(analysis: Analysis, process: int) -> list[dict[str, Any]]:
    order = run_order(analysis.launches)
    gaps = analysis.measured.gap_us if analysis.measured is not None else None
    gap = (gaps or 0.0) / max(1, len(order) - 1)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": analysis.label}},
    ]
    now = 0.0
    for launch in order:
        if launch.measured_us is None:
            continue
        events.append(
            {
                "ph": "X",
                "name": launch.kernel or launch.name,
                "cat": launch.kind,
                "pid": process,
                "tid": 0,
                "ts": round(now, 3),
                "dur": round(launch.measured_us, 3),
                "args": {"launch": launch.index, "scope": launch.scope, "roofline_us": round(launch.roofline_us, 3)},
            }
        )
        now += launch.measured_us + gap
    return events
