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


LEAST_CLOSE = {
    "graphnet-step": 0.7,
    "gru-step": 0.75,
    "haiku_lm-step": 0.53,
    "vit-step": 0.54,
    "bert-step": 0.78,
    "gpt2-step": 0.8,
}
"""Triton's kernels for the gradients of softmax, cuDNN's convolutions and repeated rows of scatters take longer."""


@pytest.mark.parametrize(
    "name",
    ["bert-forward", "gpt2-step"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("bert-step", "gemma-step", "graphnet-step", "gru-step", "haiku_lm-step", "vit-step")
    ],
)
def test_estimates_of_public_models(script, name: str):
    analysis = script.recorded_model(script.RECORDINGS / f"{name}.zip")
    row = script.accuracy(name, analysis)
    assert row.close >= LEAST_CLOSE.get(name, 0.95), row
    assert 1 / 1.6 < row.total < 1.6, row
    if name.partition("-")[0] in script.FIT_MODELS:
        assert 1 / 1.25 < row.total < 1.25, row
