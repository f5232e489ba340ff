"""Exports launches as a graph collection for Model Explorer (github.com/google-ai-edge/model-explorer)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hlo_analysis.explain import apart_because, edges_of
from hlo_analysis.records import Analysis, Launch, Value
from hlo_analysis.report.formats import format_bytes, format_flops, format_us


def model_explorer(analyses: Iterable[Analysis], label: str) -> str:
    """Returns JSON with one graph per analysis: launches in nested boxes of their scopes, arguments, values as edges.

    Args:
        analyses: one graph each, in this order.
        label: name of the collection, which Model Explorer shows beside the graphs' names.
    """
    graphs = [_graph(analysis) for analysis in analyses]
    return json.dumps({"label": label, "graphs": graphs}, ensure_ascii=False, separators=(",", ":")) + "\n"


def _graph(analysis: Analysis) -> dict[str, Any]:
    arguments = {value.name: value for launch in analysis.launches for value in launch.inputs if value.producer is None}
    reasons = {(edge.producer, edge.consumer): apart_because(edge) for edge in edges_of(analysis)}
    return {
        "id": analysis.label,
        "nodes": [
            *(_argument(value) for value in arguments.values()),
            *(_node(analysis, launch, reasons) for launch in analysis.launches),
        ],
        "groupNodeAttributes": {
            "": {
                "program": f"{analysis.provenance.function}, {analysis.provenance.mode}, {analysis.provenance.target}",
                "launches (counted)": str(analysis.launch_count),
                "HBM traffic (counted)": format_bytes(analysis.traffic.bytes),
                "time (estimated)": format_us(analysis.estimated_us),
            }
        },
    }


def _argument(value: Value) -> dict[str, Any]:
    return {
        "id": f"argument {value.name}",
        "label": value.name,
        "namespace": "arguments",
        "outputsMetadata": [_output(0, value)],
    }


def _node(analysis: Analysis, launch: Launch, reasons: dict[tuple[int, int], str]) -> dict[str, Any]:
    attributes = {
        "launch": f"#{launch.index}",
        "kind": launch.kind,
        "phase": launch.phase,
        "source": launch.source or "",
        "computes": ", ".join(f"{opcode} ×{count}" for opcode, count in launch.opcodes),
        "runs": str(launch.repeat),
        "read (counted)": format_bytes(launch.bytes_read),
        "written (counted)": format_bytes(launch.bytes_written),
        "FLOPs (counted)": format_flops(launch.flops),
        "time (estimated)": format_us(launch.estimated_us),
        "time (measured)": "" if launch.measured_us is None else format_us(launch.measured_us),
    }
    for producer in sorted(launch.producers):
        if reason := reasons.get((producer, launch.index)):
            attributes[f"apart from #{producer}"] = reason
    return {
        "id": f"launch {launch.index}",
        "label": launch.name,
        "namespace": launch.scope,
        "attrs": [{"key": key, "value": value} for key, value in attributes.items() if value],
        "incomingEdges": [
            {"sourceNodeId": _source(value), "sourceNodeOutputId": _place(analysis, value), "targetNodeInputId": str(i)}
            for i, value in enumerate(launch.inputs)
        ],
        "outputsMetadata": [_output(place, value) for place, value in enumerate(launch.outputs)],
    }


def _source(value: Value) -> str:
    return f"argument {value.name}" if value.producer is None else f"launch {value.producer}"


def _place(analysis: Analysis, value: Value) -> str:
    """Returns the number of the producer's output that a value is; the first if outputs are not told apart."""
    outputs = () if value.producer is None else analysis.launches[value.producer].outputs
    wanted = (value.name, value.shape)
    return next((str(place) for place, each in enumerate(outputs) if (each.name, each.shape) == wanted), "0")


def _output(place: int, value: Value) -> dict[str, Any]:
    attributes = (("shape", value.shape), ("size", format_bytes(value.bytes)))
    return {"id": str(place), "attrs": [{"key": key, "value": text} for key, text in attributes]}
