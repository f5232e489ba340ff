"""Perfetto timelines."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from hlo_analysis.errors import DumpError
from hlo_analysis.measured.trace import trace_events
from hlo_analysis.records import Analysis
from tests.report.examples import llama_comparison


@pytest.fixture(scope="module")
def xla() -> Analysis:
    analysis = llama_comparison()["xla"].analysis
    assert analysis is not None
    return analysis


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
