"""Defines the records of an analysis, and their JSON form.

Every view (terminal, HTML, JSON, notebook) is built from these records alone. They are frozen dataclasses. `to_json`
and `from_json` round-trip them, and `hlo_analysis.schema` keeps their JSON schema.

Three words have one meaning everywhere. *Counted* numbers are read off the compiled program (launches, bytes, FLOPs).
*Estimated* numbers come from a model: ours (`roofline_us`, `estimated_us`) or XLA's own (`xla_estimate_us`, `gain_us`).
*Measured* numbers come from a run on a GPU (`measured`, `measured_us`). Bytes are bytes, times are microseconds.
"""

from hlo_analysis.records.analysis import (
    SCHEMA_VERSION,
    Analysis,
    Device,
    Efficiency,
    GemmChoice,
    Memory,
    Provenance,
    Traffic,
)
from hlo_analysis.records.comparison import Comparison, Numerics, ScopeCell, ScopeRow, SiteRecord, StrategyResult
from hlo_analysis.records.edges import Decision, Intermediate, MissedFusion, Trial, Verdict
from hlo_analysis.records.hotspots import Hotspot
from hlo_analysis.records.launches import OPAQUE_KINDS, Launch, LaunchKind, OccupancyLimiter, Phase, Value
from hlo_analysis.records.measured import LaunchTime, Measured

__all__ = [
    "OPAQUE_KINDS",
    "SCHEMA_VERSION",
    "Analysis",
    "Comparison",
    "Decision",
    "Device",
    "Efficiency",
    "GemmChoice",
    "Hotspot",
    "Intermediate",
    "Launch",
    "LaunchKind",
    "LaunchTime",
    "Measured",
    "Memory",
    "MissedFusion",
    "Numerics",
    "OccupancyLimiter",
    "Phase",
    "Provenance",
    "ScopeCell",
    "ScopeRow",
    "SiteRecord",
    "StrategyResult",
    "Traffic",
    "Trial",
    "Value",
    "Verdict",
]
