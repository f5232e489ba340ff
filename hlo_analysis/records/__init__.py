"""The records that an analysis is made of, and their JSON form.

Every view (terminal, HTML, JSON, notebook) is made from these records and from nothing else. They are frozen
dataclasses; `to_json` and `from_json` round-trip them, and `hlo_analysis.schema` keeps their JSON schema.

Three words are kept apart everywhere. *Counted* is read off the compiled program (launches, bytes, FLOPs).
*Estimated* comes from a model: our roofline (`roofline_us`) or XLA's own cost model (`xla_estimate_us`, `gain_us`).
*Measured* means that a GPU ran it (`measured`, `measured_us`). Bytes are bytes, times are microseconds.
"""

from hlo_analysis.records.analysis import SCHEMA_VERSION, Analysis, Device, GemmChoice, Memory, Provenance, Traffic
from hlo_analysis.records.comparison import Comparison, Numerics, ScopeCell, ScopeRow, StrategyResult
from hlo_analysis.records.edges import Decision, Intermediate, MissedFusion, Verdict
from hlo_analysis.records.launches import OPAQUE_KINDS, Launch, LaunchKind, Phase, Value
from hlo_analysis.records.measured import LaunchTime, Measured

__all__ = [
    "OPAQUE_KINDS",
    "SCHEMA_VERSION",
    "Analysis",
    "Comparison",
    "Decision",
    "Device",
    "GemmChoice",
    "Intermediate",
    "Launch",
    "LaunchKind",
    "LaunchTime",
    "Measured",
    "Memory",
    "MissedFusion",
    "Numerics",
    "Phase",
    "Provenance",
    "ScopeCell",
    "ScopeRow",
    "StrategyResult",
    "Traffic",
    "Value",
    "Verdict",
]
