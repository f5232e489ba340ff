"""The estimates beside what an H200 took: the bars, at the shapes that the constants were fitted on and at others."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_estimates.py"
RECORDED = sorted((SCRIPT.parent / "public_models" / "recordings").glob("*/*.zip"))
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
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.drawn(1 / 5)])
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
    known = [row for row in rows if row.close is not None]  # kernels of "best" may have changed since the recording
    assert {"xla", "xla_cudnn"} <= {row.strategy for row in known}
    for row in known:
        assert row.close >= BELOW.get((f"{batch}x{length}", mode, row.strategy), 0.90), row
        assert row.total == pytest.approx(1, abs=0.15), row
    assert len(known) < len(rows) or script.order_is_right(comparison)


LEAST_CLOSE = {"e3nn": 0.87, "gru": 0.87, "s5": 0.85}
"""Share of the time: concatenations of short rows, products of a loop whose operands come from another launch, and
scans of strided slices that few threads compute take longer."""
LONGEST = {"evoformer-step": 3, "lstm-step": 3, "siglip-step": 3}
"""Six products of SigLIP's step take the same time as its fifth longest launch."""


@pytest.fixture(scope="module")
def models(script) -> dict[str, tuple[Any, int, bool]]:
    """How close each program's estimates are, how many of its longest launches they name, and its largest excess."""
    analyses = {file.stem: script.recorded_model(file) for file in RECORDED}
    return {
        name: (script.accuracy(name, each), script.longest_in_common(each), script.largest_is_named(each))
        for name, each in analyses.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("program", [file.stem for file in RECORDED])
def test_estimates_of_public_models(models, program: str):
    row, longest, is_named = models[program]
    name = program.partition("-")[0]
    assert row.close >= LEAST_CLOSE.get(name, 0.9), row
    assert 1 / 1.6 < row.wall < 1.6, row
    assert longest >= LONGEST.get(program, 4)
    assert is_named


@pytest.mark.slow
@pytest.mark.parametrize("is_fitted", [True, False])
def test_most_programs_take_what_they_are_estimated_at(script, models, is_fitted: bool):
    walls = [
        row.wall
        for program, (row, *_) in models.items()
        if (program.partition("-")[0] in script.FIT_MODELS) == is_fitted
    ]
    assert len(walls) >= 6
    assert sum(1 / 1.25 < wall < 1.25 for wall in walls) >= 0.9 * len(walls)


def test_each_constant_has_a_fit(script):
    of_the_block = {"memory", "matrix", "attention", "kernel_us"}
    stated = {"vector", "power", "source"}  # of a long product, and of threefry alone
    fields = {field.name for field in dataclasses.fields(script.EFFICIENCY)}
    assert fields == of_the_block | stated | set(script.OFF)
    assert set(script.TIMES) <= set(script.OFF)


def test_the_launches_that_a_constant_decides_tell_its_value(script, monkeypatch):
    file = next(file for file in RECORDED if file.stem == "gru-step")
    monkeypatch.setattr(script, "OFF", {"load_us": 1e-9, "repeated_us": 1e-9, "slow_loads": 1.0})
    found = dict(script.fit_models([file]))
    assert len(found["repeated_us"]) > 10
    assert 1.0 < median(found["repeated_us"]) < 1.6
    assert not found["slow_loads"]
