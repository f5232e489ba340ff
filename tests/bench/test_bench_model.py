"""The model benchmark without a GPU: each phase runs, is checked, and hands its results on, with invented times."""

from __future__ import annotations

import dataclasses

import pytest

from xlafuse.bench import model
from xlafuse.bench.model import PHASES, ModelSettings, bench_model, model_lines, tokens_per_second
from xlafuse.strategies import Strategy

pytestmark = pytest.mark.usefixtures("quick_programs")

SETTINGS = ModelSettings(model="tiny", strategies=("xla", "other"), layers=1, rounds=1, calls=2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick = model.time_candidates
    monkeypatch.setattr(model, "time_candidates", lambda *a, **kw: quick(*a, **kw, warm_up_seconds=(0.0, 0.0)))
    monkeypatch.setattr(model, "get_strategy", lambda name: Strategy(name=name, description="XLA again"))
    monkeypatch.setattr(model, "_ROOM", 8)


@pytest.mark.usefixtures("invented_times")
@pytest.mark.parametrize("is_scanned", [False, True])
def test_every_phase_is_measured(is_scanned):
    settings = dataclasses.replace(SETTINGS, is_scanned=is_scanned)
    results = [result for result in bench_model("2x8", settings) if not isinstance(result, str)]
    assert [result.phase for result in results] == list(PHASES)
    for result in results:
        assert result.problems == ()
        assert [each.name for each in result.candidates] == ["xla", "other"]
        first = result.candidates[0]
        assert first.compile_seconds > 0
        assert first.peak_bytes > result.bytes
        tokens = 2 if result.phase == "decode" else 16
        assert tokens_per_second(result, "xla") == pytest.approx(tokens / first.timing.wall_us * 1e6)
        assert len(model_lines(result)) == 3


@pytest.mark.usefixtures("invented_times")
def test_a_wrong_strategy_is_a_problem_and_no_time(monkeypatch):
    right = model._compiled

    def compiled(strategy, *rest):
        step, costs = right(strategy, *rest)
        return (step if strategy == "xla" else lambda *arguments: 2 * step(*arguments)), costs

    monkeypatch.setattr(model, "_compiled", compiled)
    (result,) = bench_model("1x8", dataclasses.replace(SETTINGS, phases=("forward",)))
    assert [each.name for each in result.candidates] == ["xla"]
    assert "off by 1" in result.problems[0].message


def test_no_time_left_is_told():
    assert list(bench_model("1x8", dataclasses.replace(SETTINGS, phases=("decode",), seconds=-1.0))) == [
        "tiny decode 1x8: not begun within -1 s"
    ]
