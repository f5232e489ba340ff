"""`xlafuse export` on a saved report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_all_strategies_or_one(invoke, report: str):
    assert invoke("export", report, "-o", "all.json").stdout == "wrote all.json\n"
    assert invoke("export", f"{report}:pallas", "--format", "model-explorer", "-o", "one.json").exit_code == 0
    files = [json.loads(Path(file).read_text()) for file in ("all.json", "one.json")]
    names = [[graph["id"] for graph in file["graphs"]] for file in files]
    assert names == [["unfused", "xla", "xla_cudnn", "pallas"], ["pallas"]]


def test_a_timeline(invoke, report: str):
    assert invoke("export", f"{report}:xla", "--format", "perfetto", "-o", "trace.json").exit_code == 0
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 13


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "perfetto", "--times", "measured"], "no launch of the program was measured"),
        (["-o", "absent/graph.json"], "no folder absent"),
        (["--format", "dot"], "'dot' is not one of"),
    ],
)
def test_bad_input(invoke, report: str, words: list[str], message: str):
    result = invoke("export", report, *(["-o", "x.json"] if "-o" not in words else []), *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not Path("x.json").exists()
