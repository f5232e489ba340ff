"""The estimates beside what an H200 took: the bars, at the shapes that the constants were fitted on and at others."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_estimates.py"
BELOW = {("1x512", "grad", "xla"): 0.89}
"""Triton's products and reductions over scores whose fastest dimension is 4 long take twice the estimate or more."""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("check_estimates", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "check_estimates", module)
    spec.loader.exec_module(module)
    yield module
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("batch", "length", "mode"),
    [
        (1, 1, "forward"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, 4096, "forward"),
                (2, 4096, "grad"),
                (1, 512, "forward"),
                (1, 512, "grad"),
                (16, 1, "forward"),
            )
        ),
    ],
)
def test_estimates_are_close_to_the_recorded_times(script, batch: int, length: int, mode: str):
    pytest.importorskip("jax_plugins.xla_cuda13")
    comparison = script.compared(batch, length, mode)
    rows = [script.accuracy(name, analysis) for name, analysis in script.analyses(comparison)]
    assert [row.strategy for row in rows] == ["xla", "best", "xla_cudnn"]
    for row in rows:
        assert row.close is not None
        assert row.close >= BELOW.get((f"{batch}x{length}", mode, row.strategy), 0.90), row
        assert row.total == pytest.approx(1, abs=0.15), row
    assert script.order_is_right(comparison)
