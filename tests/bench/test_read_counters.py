"""Nsight Compute's table as rows, with an imitation of it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_bench_results import H200

from pallas_kernels import testing
from xlafuse.bench import environment, peers

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/read_counters.py"
CASES = ["linear:forward:16-4096-4096-bfloat16", "softmax:forward:1x4096-bfloat16"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("read_counters", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_case_may_be_of_a_peer(script, monkeypatch):
    calls = []
    candidate = SimpleNamespace(call=lambda x: calls.append(x), inputs=[("input",)], wait=lambda result: result)
    peer = SimpleNamespace(candidate=lambda operation, phase, cases: (candidate, {}))
    monkeypatch.setattr(peers, "load", lambda name: peer)
    monkeypatch.setattr(testing, "make_case", lambda op, spec, seed: SimpleNamespace(arguments={}, cotangents=()))
    script.compiled("attention:backward:4x4096x4096x32x8x64-bfloat16:fa4")()
    assert calls == ["input", "input"]


def ended(command, stdout, code=0):
    return subprocess.CompletedProcess(command, code, stdout, "")


def test_launches_belong_to_their_cases(script, monkeypatch):
    def ncu(command, **_):
        metrics = command[command.index("--metrics") + 1].split(",")
        header = ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *metrics))
        units = ",".join(["", "", *("msecond" if metric.startswith("gpu__time") else "" for metric in metrics)])
        rows = [
            f"{i},{kernel}{',2.5' * (len(metrics) - 1)},n/a" for i, kernel in enumerate(("ours", "wrapped_tan", "b"))
        ]
        return ended(command, "\n".join(("==PROF== on", header, units, *rows)))

    monkeypatch.setattr(subprocess, "run", ncu)
    rows = script.read(CASES)
    assert [(row["case"], row["kernel"]) for row in rows] == [(CASES[0], "ours"), (CASES[1], "b")]
    assert rows[0]["us"] == 2500.0
    assert rows[0]["pipe_tensor_percent"] == 2.5
    assert rows[0]["stall_gmma"] is None
    assert script.line(rows[0]).startswith(f"{CASES[0]}  ours: us 2500.0, dram_percent 2.5, ")


def test_what_ncu_says_is_told_when_it_fails(script, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ended(command, "==ERROR== no permission", 1))
    with pytest.raises(RuntimeError, match="no permission"):
        script.read(CASES)


def test_of_a_study_launches_are_summed_by_variant(script, monkeypatch):
    monkeypatch.setattr(environment, "environment", lambda: H200)
    cases = script.of_study("softmax", "4096 × 4096")
    assert "study:softmax:4096 × 4096 float32:XLA" in cases
    assert not any("PyTorch" in case for case in cases)
    counters = {"read_bytes": 2.0, "written_bytes": None, "l2_hit_percent": 7.0}
    rows = [{"case": cases[0], "us": us, **counters, "l2_hit_percent": us} for us in (3.0, 5.0)]
    (row,) = json.loads(script.study_part("softmax", rows))["parts"][0]["rows"]
    assert (row["case"], row["variant"]) == ("4096 × 4096 float32", "unfused")
    values = {"counted_us": 8.0, "dram_read_bytes": 4.0, "dram_write_bytes": 0.0, "l2_hits": 5.0}
    assert row["values"] == values
