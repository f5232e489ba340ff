"""The script that records blocks on a GPU, with runs invented."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from profiles import RUN, as_run

import xlafuse
from hlo_analysis import Capture, analyze, capture
from hlo_analysis.diff import compare_analyses
from hlo_analysis.records import StrategyResult
from xlafuse.measurements import load

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str):
    return SimpleNamespace(**runpy.run_path(str(SCRIPTS / name)))


@pytest.fixture
def captured(tmp_path: Path):
    pytest.importorskip("jax_plugins.xla_cuda13")
    made = capture(lambda x: jnp.sin(x) @ x, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), keep=tmp_path / "kept")
    kernels = [launch.kernel or "nvjet" for launch in analyze(made).launches]
    return as_run(made, RUN, kernels * 3)


def test_a_file_of_a_case_has_the_strategies_that_were_measured(captured, monkeypatch, tmp_path: Path, capsys):
    def compared(preset, shape, **options):
        assert (preset, shape, options["mode"], options["target"]) == ("llama3-8b", (1, 1), "forward", "attached")
        results = (
            StrategyResult(name="xla", description="", analysis=analyze(captured)),
            StrategyResult(name="best", description="", analysis=None, error="RuntimeError: out of memory"),
        )
        return compare_analyses("llama3-8b", results, "xla")

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(xlafuse, "compare", compared)
    monkeypatch.setattr(sys, "argv", ["x", "-o", str(tmp_path), "llama3-8b/1x1/forward"])
    assert script("record_measured.py").main() == 1
    assert "best       FAILED RuntimeError: out of memory" in capsys.readouterr().out
    recorded = load(tmp_path / "nvidia-h200" / "llama3-8b-1x1-forward.json")
    assert recorded.title == "llama3-8b/1x1/forward"
    assert list(recorded.strategies) == ["xla"]
    assert recorded.strategies["xla"].calls == 3
    assert recorded.strategies["xla"].launches


def test_an_archive_has_what_the_estimates_need_of_kernels(captured, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    script("public_models/record.py").slim(captured).save(tmp_path / "slim.zip")
    kept = Capture.load(tmp_path / "slim.zip")
    assert not kept.ptx()
    assert [launch.instructions for launch in analyze(kept).launches if launch.registers]
