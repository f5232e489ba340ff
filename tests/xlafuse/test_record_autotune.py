"""The recording script covers what the shipped block needs, and keeps what it has when something goes wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from xlafuse.strategies import STRATEGIES

SCRIPT = Path(__file__).parents[2] / "scripts" / "record_autotune.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    spec = importlib.util.spec_from_file_location("record_autotune", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_strategy_is_recorded_at_every_shape_and_mode(script):
    cases = script.cases()
    assert len(set(cases)) == len(cases)
    llama = {case[1:] for case in cases if case[0] == "llama3-8b"}
    shapes = ((2, 4096), (1, 512), (1, 1))
    # The GPU machine's Triton is too old for `triton`; `fused` rewrites the function, which the script does not; and
    # `pallas_overlap` is `best` on one device.
    names = set(STRATEGIES) - {"triton", "fused", "pallas_overlap"}
    everything = {(name, mode, shape) for name in names for mode in ("forward", "grad") for shape in shapes}
    assert everything - llama == {(name, "grad", (1, 1)) for name in ("xla_cudnn", "pallas_cudnn")}
    assert {case[1] for case in cases if case[0] == "gpt2-medium"} == {"xla", "pallas"}
    # A run cut short has at least what `xla` needs.
    assert {case[1] for case in cases[:6]} == {"xla"}


def row(case, reused=0):
    preset, strategy, mode, shape = case
    named = {"preset": preset, "strategy": strategy, "mode": mode, "shape": list(shape)}
    return {**named, "reused": reused, "lookups": 1, "kinds": {"loop": 1}, "seconds": 0.0}


def test_a_failing_case_costs_only_itself(script, monkeypatch, tmp_path, capsys):
    def record(case, recording):
        if case[2:] == ("forward", (1, 512)):
            raise RuntimeError("out of memory")
        return row(case)

    monkeypatch.setattr(script, "record", record)
    launches = tmp_path / "new" / "launches.json"
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "r.txtpb"), str(launches), "--only", "llama3-8b/xla/"])
    assert script.main() == 1
    written = json.loads(launches.read_text())
    assert len(written["cases"]) == 5
    assert written["failed"] == [{"case": "llama3-8b/xla/forward/1x512", "error": "RuntimeError: out of memory"}]
    assert "FAILED RuntimeError: out of memory" in capsys.readouterr().out


def test_some_cases_are_recorded_anew_and_the_others_stay(script, monkeypatch, tmp_path):
    recording, launches = tmp_path / "r.txtpb", tmp_path / "launches.json"

    def run(reused, *only):
        monkeypatch.setattr(script, "record", lambda case, recording: row(case, reused))
        monkeypatch.setattr(sys, "argv", ["x", str(recording), str(launches), *only])
        assert script.main() == 0

    run(1)
    recording.write_text("kept")
    everything = list(script.known_rows(launches))
    run(2, "--only", "llama3-8b/pallas/grad/", "gpt2-medium/")
    assert recording.read_text() == "kept"
    rows = script.known_rows(launches)
    assert list(rows) == everything == script.cases()
    anew = {case[:3] for case, found in rows.items() if found["reused"] == 2}
    assert anew == {("llama3-8b", "pallas", "grad")} | {case[:3] for case in everything if case[0] == "gpt2-medium"}
    run(3)
    assert not recording.exists()
