"""What the page's script reads: a comparison as JSON, compact enough to embed.

Lists of records become one list of columns and rows; long texts that repeat (HLO, reasons, scopes) live once in a
pool and are named by their number.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from hlo_analysis.records import Analysis, Comparison, Decision, Launch, MissedFusion, StrategyResult, Value
from hlo_analysis.report import words
from hlo_analysis.report.graph import LaunchGraph, launch_graph
from hlo_analysis.report.kinds import FAMILY_OF

LAUNCH_COLUMNS = (
    "index", "name", "kind", "repeat", "scope", "phase", "source", "opName", "grid", "block", "shared", "opcodes",
    "inputs", "outputs", "read", "written", "flops", "unfused", "roofline", "limiter", "xla", "xlaModel", "measured",
    "registers", "spill", "computation", "hlo",
)  # fmt: skip
LAUNCH_POOLED = ("scope", "source", "opName", "xlaModel", "computation", "hlo")
DECISION_COLUMNS = (
    "producer", "consumer", "verdict", "reason", "category", "pass", "gain", "from", "to", "bytes", "shape", "scope",
)  # fmt: skip
DECISION_POOLED = ("verdict", "reason", "category", "pass", "shape", "scope")
MISSED_COLUMNS = (
    "rank", "value", "shape", "from", "to", "bytes", "time", "share", "reason", "category", "remedyKind", "remedy",
    "scope",
)  # fmt: skip


class Pool:
    """Texts that are stored once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int | None:
        """The text's place in the pool; None stays None."""
        if text is None:
            return None
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


def payload(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain JSON values."""
    pool = Pool()
    return {
        "title": comparison.title,
        "baseline": comparison.baseline,
        "families": FAMILY_OF,
        "strategies": [_strategy(result, pool) for result in comparison.strategies],
        "rows": [
            {
                "scope": row.scope,
                "phase": row.phase,
                "cells": {
                    cell.strategy: {
                        "launches": cell.launches,
                        "bytes": cell.bytes,
                        "roofline": round(cell.roofline_us, 3),
                        "fusedInto": cell.fused_into,
                    }
                    for cell in row.cells
                },
            }
            for row in comparison.rows
        ],
        "texts": pool.texts,
    }


def embedded_json(value: object) -> str:
    """JSON that may stand inside a script element: no text in it can close the element or open another.

    U+2028 and U+2029 end lines in scripts; the slash is escaped so that no text reads as an address.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for plain in "<>&\u2028\u2029":
        text = text.replace(plain, f"\\u{ord(plain):04x}")
    return text.replace("//", "\\/\\/")


def _strategy(result: StrategyResult, pool: Pool) -> dict[str, Any]:
    analysis = result.analysis
    plain: dict[str, Any] = {"name": result.name, "description": result.description, "error": result.error}
    if analysis is None:
        return plain
    return plain | {
        "gemm": words.gemm_words(analysis.provenance),
        "totals": totals(result, analysis),
        "kinds": analysis.launches_by_kind,
        "launches": _table(LAUNCH_COLUMNS, LAUNCH_POOLED, map(_launch, analysis.launches), pool),
        "decisions": _table(DECISION_COLUMNS, DECISION_POOLED, map(_decision, analysis.decisions), pool),
        "missed": _table(MISSED_COLUMNS, (), map(_missed, analysis.missed), pool),
        "silent": Counter(reason for _, reason in analysis.silent).most_common(),
        "graph": _graph(launch_graph(analysis)),
    }


def totals(result: StrategyResult, analysis: Analysis) -> dict[str, float | None]:
    """The numbers that strategies are compared by: counts, bytes, microseconds."""
    return {
        "launches": analysis.launch_count,
        "bytes": analysis.traffic.bytes,
        "saved": analysis.traffic.saved_bytes,
        "between": analysis.traffic.intermediate_bytes,
        "roofline": round(analysis.roofline_us, 3),
        "peak": words.peak_bytes(analysis),
        "measured": result.measured_us,
    }


def _table(
    columns: Sequence[str], pooled: Sequence[str], rows: Iterable[tuple[Any, ...]], pool: Pool
) -> dict[str, Any]:
    places = [columns.index(name) for name in pooled]
    made = []
    for row in rows:
        values = list(row)
        for place in places:
            values[place] = pool.number(values[place])
        made.append(values)
    return {"columns": columns, "pooled": pooled, "rows": made}


def _value(value: Value) -> tuple[Any, ...]:
    return value.name, value.shape, value.bytes, value.producer


def _launch(launch: Launch) -> tuple[Any, ...]:
    return (
        launch.index, launch.name, launch.kind, launch.repeat, launch.scope, launch.phase, launch.source,
        launch.op_name, launch.grid, launch.block, launch.shared_memory_bytes, launch.opcodes,
        [_value(value) for value in launch.inputs], [_value(value) for value in launch.outputs],
        launch.bytes_read, launch.bytes_written, launch.flops, launch.unfused_bytes, round(launch.roofline_us, 3),
        launch.limiter, _rounded(launch.xla_estimate_us), launch.xla_estimate_model, launch.measured_us,
        launch.registers, launch.spill_bytes, launch.computation, launch.hlo,
    )  # fmt: skip


def _decision(decision: Decision) -> tuple[Any, ...]:
    return (
        decision.producer, decision.consumer, decision.verdict, decision.reason, decision.category,
        decision.pass_name, _rounded(decision.gain_us), decision.producer_launch, decision.consumer_launch,
        decision.bytes, decision.shape, decision.scope,
    )  # fmt: skip


def _missed(missed: MissedFusion) -> tuple[Any, ...]:
    return (
        missed.rank, missed.value, missed.shape, missed.producer, missed.consumers, missed.bytes_at_stake,
        round(missed.time_at_stake_us, 3), round(missed.share, 4), missed.reason, missed.category,
        missed.remedy_kind, missed.remedy, missed.scope,
    )  # fmt: skip


def _graph(graph: LaunchGraph) -> dict[str, Any]:
    return {
        "clusters": [
            {"scope": c.scope, "phase": c.phase, "launches": c.launches, "places": c.places} for c in graph.clusters
        ],
        "layers": graph.layers,
        "routes": [[route.source, route.target, route.via] for route in graph.routes],
        "edges": graph.edges,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
