"""Reads what XLA did with a program: launches, fusion decisions, traffic. Knows nothing of the other packages.

>>> from hlo_analysis import analyze, capture
>>> analysis = analyze(capture(fn, *shapes, target="h200"))       # doctest: +SKIP
>>> analysis.launch_count, analysis.traffic.saved_bytes             # doctest: +SKIP

Importing it does not import JAX; the first capture does.
"""

from hlo_analysis.analysis import analyze
from hlo_analysis.capture import Capture, capture
from hlo_analysis.capture.plugin_log import silence_missing_gpu
from hlo_analysis.diff import compare_analyses
from hlo_analysis.errors import (
    CaptureError,
    DumpError,
    HloAnalysisError,
    HloParseError,
    UnknownOptionError,
    UnknownTargetError,
)
from hlo_analysis.hlo import parse_module
from hlo_analysis.records import Analysis, Comparison, Launch
from hlo_analysis.saved import load, save
from hlo_analysis.schema import from_json, json_schema, to_json
from hlo_analysis.tables import to_dataframe
from hlo_analysis.targets import load_target, target_names

__all__ = [
    "Analysis",
    "Capture",
    "CaptureError",
    "Comparison",
    "DumpError",
    "HloAnalysisError",
    "HloParseError",
    "Launch",
    "UnknownOptionError",
    "UnknownTargetError",
    "analyze",
    "capture",
    "compare_analyses",
    "from_json",
    "json_schema",
    "load",
    "load_target",
    "parse_module",
    "save",
    "target_names",
    "to_dataframe",
    "to_json",
]


def __dir__() -> list[str]:
    return sorted(__all__)


# Set at import: otherwise a user's first use of JAX, before any capture, would show the CUDA plugin's complaint.
silence_missing_gpu()
