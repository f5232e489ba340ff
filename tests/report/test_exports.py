"""Model Explorer graphs and Perfetto timelines."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from hlo_analysis.errors import DumpError
from hlo_analysis.measured.trace import trace_events
from hlo_analysis.records import Analysis, Comparison
from hlo_analysis.report.model_explorer import model_explorer
from tests.report.examples import llama_comparison


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return llama_comparison()


@pytest.fixture(scope="module")
def xla(comparison: Comparison) -> Analysis:
    analysis = comparison["xla"].analysis
    assert analysis is not None
    return analysis


def test_a_graph_has_every_launch_and_every_value(comparison: Comparison, xla: Analysis):
    analyses = [result.analysis for result in comparison.strategies if result.analysis is not None]
    collection = json.loads(model_explorer(analyses, "block"))
    assert collection["label"] == "block"
    assert [graph["id"] for graph in collection["graphs"]] == [analysis.label for analysis in analyses]
    graph = next(graph for graph in collection["graphs"] if graph["id"] == "xla")
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"])
    for launch in xla.launches:
        node = nodes[f"launch {launch.index}"]
        assert (node["label"], node["namespace"]) == (launch.name, launch.scope)
        assert len(node["incomingEdges"]) == len(launch.inputs)
        for edge, value in zip(node["incomingEdges"], launch.inputs, strict=True):
            source = nodes[edge["sourceNodeId"]]
            assert source["label"] == (value.name if value.producer is None else xla.launches[value.producer].name)
            output = next(each for each in source["outputsMetadata"] if each["id"] == edge["sourceNodeOutputId"])
            assert {"key": "shape", "value": value.shape} in output["attrs"]
    softmax = {each["key"]: each["value"] for each in nodes["launch 5"]["attrs"]}
    assert softmax["apart from #4"] == "priority-fusion: Fusing costs more than it saves"
    assert all(isinstance(value, str) for value in softmax.values())


def test_an_estimated_timeline_takes_the_estimated_time(xla: Analysis):
    events = json.loads(trace_events(xla, times="estimated"))["traceEvents"]
    assert events[0]["args"]["name"] == "xla (estimated)"
    launches = [event for event in events if event["ph"] == "X"]
    assert [event["args"]["launch"] for event in launches] == list(range(13))
    last = launches[-1]
    assert last["ts"] + last["dur"] - launches[0]["ts"] == pytest.approx(xla.estimated_us, abs=0.01)
    for event, following in pairwise(launches):
        assert following["ts"] >= event["ts"] + event["dur"] - 0.001


def test_measured_times_are_not_made_up(xla: Analysis):
    with pytest.raises(DumpError, match="no launch of the program was measured"):
        trace_events(xla)
