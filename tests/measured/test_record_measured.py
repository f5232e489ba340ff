"""The script that records blocks on a GPU, with runs invented."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from profiles import RUN, as_run

from hlo_analysis import Capture, analyze, capture
from xlafuse.measurements import load

SCRIPT = Path(__file__).parents[2] / "scripts" / "record_measured.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    spec = importlib.util.spec_from_file_location("record_measured", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_of_cases_and_what_they_are_made_of(script, monkeypatch, tmp_path: Path, capsys):
    pytest.importorskip("jax_plugins.xla_cuda13")

    def compiled(case, strategy, target):
        if strategy == "best":
            raise RuntimeError("out of memory")
        made = capture(lambda x: jnp.sin(x) @ x, jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), keep=tmp_path / "kept")
        kernels = [launch.kernel or "nvjet" for launch in analyze(made).launches]
        return as_run(made, RUN, kernels * 3)

    monkeypatch.setattr(script, "compiled", compiled)
    words = ["x", "-o", str(tmp_path), "--only", "llama3-8b/1x1/forward", "--strategies", "xla,best"]
    monkeypatch.setattr(sys, "argv", words)
    assert script.main() == 1
    assert "best       FAILED RuntimeError: out of memory" in capsys.readouterr().out
    file = tmp_path / "nvidia-h200" / "llama3-8b-1x1-forward.json"
    recorded = load(file)
    assert recorded.strategies["xla"].calls == 3
    assert recorded.strategies["xla"].launches

    # The archive has what the estimates need of the kernels that it leaves out.
    kept = Capture.load(tmp_path / "captures" / "llama3-8b-1x1-forward-xla.zip")
    assert not kept.ptx()
    assert [launch.instructions for launch in analyze(kept).launches if launch.registers]

    # The archive makes the same file again.
    file.unlink()
    monkeypatch.setattr(sys, "argv", [*words, "--again"])
    assert script.main() == 0
    assert load(file) == recorded
