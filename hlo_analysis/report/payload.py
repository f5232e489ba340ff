"""Encodes a comparison as compact JSON for the page's script.

Lists of records become tables of columns and rows. Repeated text (HLO, reasons, scopes) is stored once in a pool and
referenced by number. The JSON is compressed: the page of a model with 200 layers has 2 MB, instead of 12 MB.

The PTX of the kernels is apart, so that the script unpacks it only when a reader asks for it.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hlo_analysis.costs.roofline import supported_estimate
from hlo_analysis.decisions.categories import CATEGORIES
from hlo_analysis.decisions.explanations import plain_reason
from hlo_analysis.records import (
    Analysis,
    Comparison,
    Device,
    Hotspot,
    Launch,
    MissedFusion,
    StrategyResult,
    Trial,
    Value,
)
from hlo_analysis.report import sentences
from hlo_analysis.report.advice import advice, listed
from hlo_analysis.report.graph import LaunchGraph, launch_graph
from hlo_analysis.report.launch_families import FAMILY_OF
from hlo_analysis.report.similar_layers import group_missed

LAUNCHES = {
    "index": "index", "name": "name", "kind": "kind", "repeat": "repeat", "scope": "scope", "phase": "phase",
    "source": "source", "opName": "op_name", "grid": "grid", "block": "block", "shared": "shared_memory_bytes",
    "opcodes": "opcodes", "inputs": "inputs", "outputs": "outputs", "read": "bytes_read", "written": "bytes_written",
    "host": "host_bytes", "link": "link_bytes", "axes": "axes", "exposed": "exposed_us", "flops": "flops",
    "unfused": "unfused_bytes", "roofline": "roofline_us", "limiter": "limiter", "estimate": "estimated_us",
    "xla": "xla_estimate_us", "xlaModel": "xla_estimate_model", "measured": "measured_us", "kernel": "kernel",
    "registers": "registers", "spill": "spill_bytes", "occupancy": "occupancy",
    "occupancyLimiter": "occupancy_limiter", "hlo": "hlo", "ptx": "ptx",
}  # fmt: skip
"""Columns of a table, each with the field of the record that it shows."""
LAUNCH_POOLED = ("kernel", "scope", "source", "opName", "xlaModel", "hlo")
DECISIONS = {
    "producer": "producer", "consumer": "consumer", "verdict": "verdict", "reason": "reason", "category": "category",
    "pass": "pass_name", "gain": "gain_us", "from": "producer_launch", "to": "consumer_launch", "bytes": "bytes",
    "shape": "shape", "scope": "scope",
}  # fmt: skip
DECISION_POOLED = ("verdict", "reason", "category", "pass", "shape", "scope")
MISSED = {
    "rank": "rank", "value": "value", "shape": "shape", "from": "producer", "to": "consumers",
    "bytes": "bytes_at_stake", "time": "remaining_us", "share": "share", "reason": "reason", "category": "category",
    "remedyKind": "remedy_kind", "remedy": "remedy", "scope": "scope", "source": "source", "code": "code",
    "trial": "trial", "plain": "category", "group": "rank",
}  # fmt: skip
MISSED_POOLED = ("shape", "reason", "category", "remedyKind", "remedy", "scope", "source", "code", "plain")
HOTSPOTS = {
    "missed": "missed", "cause": "cause", "scope": "scope", "source": "source", "time": "time_us",
    "excess": "excess_us", "how": "how", "most": "most_us", "remedyKind": "remedy_kind", "remedy": "remedy",
    "kernel": "kernel", "code": "code", "trial": "trial", "waits": "waits_for_host",
}  # fmt: skip
HOTSPOT_POOLED = ("cause", "scope", "source", "remedyKind", "remedy", "code")
TRIAL = {
    "change": "change", "launches": "saved_launches", "bytes": "saved_bytes", "time": "saved_us", "helps": "helps",
    "error": "error",
}  # fmt: skip

PTX_LIMIT = 500_000
"""Characters that the compressed PTX may take of a page. The gradients of a Llama block take 0.1 MB with XLA alone and
0.47 MB with all ten strategies, beside 0.5 MB for the rest of the page."""


class Pool:
    """Stores each text once, in sorted order.

    A compressor looks back a few ten kilobytes. Sorting puts the text of a layer's launch next to the most similar
    text: that of the same launch in the layer before.
    """

    def __init__(self, texts: Iterable[str | None]) -> None:
        self.texts: list[str] = sorted({text for text in texts if text is not None})
        self._numbers = {text: number for number, text in enumerate(self.texts)}

    def number(self, text: str | None) -> int | None:
        """Returns the text's place in the pool, or None for None."""
        return None if text is None else self._numbers[text]


def payload(comparison: Comparison, ptx: Sequence[str] = ()) -> dict[str, Any]:
    """Converts the comparison to plain JSON values; a launch has the place of its source in `ptx`, if it is there."""
    places = {text: place for place, text in enumerate(ptx)}
    tables = {
        result.name: _tables(result.analysis, places) for result in comparison.strategies if result.analysis is not None
    }
    pool = Pool(text for made in tables.values() for table in made.values() for text in table.long_texts())
    return {
        "baseline": comparison.baseline,
        "families": FAMILY_OF,
        "categories": CATEGORIES,
        "strategies": [_strategy(result, tables.get(result.name, {}), pool) for result in comparison.strategies],
        "texts": pool.texts,
    }


def page_ptx(comparison: Comparison) -> list[str]:
    """Returns the PTX for the page, each source once: that of the baseline and of each further strategy that fits."""
    kept: list[str] = []
    for result in sorted(comparison.strategies, key=lambda result: result.name != comparison.baseline):
        wanted = list(dict.fromkeys([*kept, *(result.analysis.ptx if result.analysis else ())]))
        if len(wanted) > len(kept) and len(embedded_json(wanted)) <= PTX_LIMIT:
            kept = wanted
    return kept


def embedded_json(value: object) -> str:
    """Returns compressed JSON (gzip) in base64, which no text in it can use to close a script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A name may hold half of a UTF-16 surrogate pair, which is not text: JSON can write it, UTF-8 cannot.
    raw = text.encode("utf-8", "backslashreplace")
    return base64.b64encode(gzip.compress(raw, compresslevel=9, mtime=0)).decode()


def _strategy(result: StrategyResult, tables: Mapping[str, _Table], pool: Pool) -> dict[str, Any]:
    analysis = result.analysis
    plain: dict[str, Any] = {"name": result.name}
    if analysis is None:
        return plain
    return plain | {
        "totals": totals(result, analysis),
        "device": _device(analysis.device),
        **{name: table.plain(pool) for name, table in tables.items()},
        "silent": Counter(reason for _, reason in analysis.silent).most_common(),
        "graph": _graph(launch_graph(analysis)),
        "advice": _advice(analysis),
        "lines": analysis.source_lines,
    }


def totals(result: StrategyResult, analysis: Analysis) -> dict[str, float | None]:
    """Returns the numbers by which strategies are compared: launches, bytes, microseconds."""
    return {
        "launches": analysis.launch_count,
        "bytes": analysis.traffic.bytes,
        "between": analysis.traffic.intermediate_bytes,
        "roofline": round(analysis.roofline_us, 3),
        "estimate": round(analysis.estimated_us, 3),
        "exposed": analysis.exposed_us,
        "peak": sentences.peak_bytes(analysis),
        "measured": result.measured_us,
        "wall": result.wall_us,
    }


@dataclass(frozen=True, kw_only=True)
class _Table:
    """A table with one row per record; the texts of the `pooled` columns are in the pool."""

    columns: tuple[str, ...]
    pooled: tuple[str, ...]
    rows: Sequence[Sequence[Any]]

    def _places(self) -> list[int]:
        return [self.columns.index(name) for name in self.pooled]

    def long_texts(self) -> Iterator[str | None]:
        places = self._places()
        return (row[place] for row in self.rows for place in places)

    def plain(self, pool: Pool) -> dict[str, Any]:
        places = self._places()
        made = []
        for row in self.rows:
            values = list(row)
            for place in places:
                values[place] = pool.number(values[place])
            made.append(values)
        return {"columns": self.columns, "pooled": self.pooled, "rows": made}


def _tables(analysis: Analysis, places: Mapping[str, int]) -> dict[str, _Table]:
    launches = [
        _row(
            launch,
            LAUNCHES,
            axes=", ".join(f"{name}={size}" for name, size in launch.axes),
            xlaModel=_xla_model(launch),
            ptx=None if launch.ptx is None else places.get(analysis.ptx[launch.ptx], -1),
        )
        for launch in analysis.launches
    ]
    missed = [
        _row(
            item,
            MISSED,
            share=round(item.share, 4),
            code=remedy_code(item),
            plain=plain_reason(item.category, *_ends(item, analysis)),
            group=group,
        )
        for group, alike in enumerate(group_missed(analysis))
        for item in alike
    ]
    hotspots = [_row(item, HOTSPOTS, code=remedy_code(item)) for item in listed(analysis)]
    decisions = [_row(decision, DECISIONS) for decision in analysis.decisions]
    return {
        "launches": _Table(columns=tuple(LAUNCHES), pooled=LAUNCH_POOLED, rows=launches),
        "decisions": _Table(columns=tuple(DECISIONS), pooled=DECISION_POOLED, rows=decisions),
        "missed": _Table(columns=tuple(MISSED), pooled=MISSED_POOLED, rows=missed),
        "hotspots": _Table(columns=tuple(HOTSPOTS), pooled=HOTSPOT_POOLED, rows=hotspots),
    }


def _row(record: object, columns: Mapping[str, str], **instead: Any) -> list[Any]:
    """Returns a record's fields by columns, or the values `instead` of them; times have three decimals."""
    found = {name: getattr(record, field) for name, field in columns.items() if name not in instead}
    for name, value in found.items():
        match value:
            case float() if columns[name].endswith("_us"):
                found[name] = round(value, 3)
            case Trial():
                found[name] = dict(zip(TRIAL, _row(value, TRIAL), strict=True))
            case (Value(), *_):
                found[name] = [(each.name, each.shape, each.bytes, each.producer) for each in value]
    return [(found | instead)[name] for name in columns]


def _xla_model(launch: Launch) -> str | None:
    support = supported_estimate(launch.kind, launch.estimated_us, launch.xla_estimate_us)
    return "; ".join(filter(None, (launch.xla_estimate_model, support))) or None


def _ends(item: MissedFusion, analysis: Analysis) -> tuple[Launch, Launch]:
    return analysis.launches[item.producer], analysis.launches[item.consumers[0]]


def remedy_code(missed: MissedFusion | Hotspot) -> str:
    """Returns Python code that applies the remedy: the record's own, or a `jax.jit` with its options; '' if neither."""
    if missed.code or not missed.options:
        return missed.code
    options = ", ".join(f"{name!r}: {value!r}" for name, value in missed.options)
    return f"jax.jit(f, compiler_options={{{options}}})"


def _device(device: Device) -> dict[str, Any]:
    """Returns the roofs of the roofline chart: bytes per second, and FLOP/s by element type."""
    return {
        "memory": device.memory_name,
        "isCpu": device.is_cpu,
        "bandwidth": device.memory_bandwidth,
        "matrix": device.matrix_flops,
        "vector": device.vector_flops,
        "overhead": device.launch_overhead_us,
    }


def _advice(analysis: Analysis) -> list[dict[str, Any]]:
    """Returns the remedies; `places` are those of their hotspots in the table."""
    place = {id(item): number for number, item in enumerate(listed(analysis))}
    return [
        {
            "places": [place[id(item)] for item in each.hotspots],
            "launches": each.launches,
            "layers": each.layers,
            "saved": round(each.saved_us, 3),
            "isOpen": each.is_open,
        }
        for each in advice(analysis)
    ]


def _graph(graph: LaunchGraph) -> dict[str, Any]:
    return {
        "clusters": [
            {"scope": c.scope, "phase": c.phase, "launches": c.launches, "places": c.places} for c in graph.clusters
        ],
        "layers": graph.layers,
        "routes": [[route.source, route.target, route.via] for route in graph.routes],
        "edges": graph.edges,
    }
