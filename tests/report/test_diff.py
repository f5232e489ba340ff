from __future__ import annotations

from dataclasses import replace

import pytest

from hlo_analysis.diff import compare_analyses
from hlo_analysis.records import Comparison, StrategyResult
from tests.report.example_steps import PALLAS_STEPS, XLA_STEPS, Step
from tests.report.examples import analysis_of


def _result(name: str, *steps: Step) -> StrategyResult:
    return StrategyResult(name=name, description="", analysis=analysis_of(steps, name))


def _step(scope: str) -> Step:
    return Step(name=f"op.{scope}", kind="loop", scope=scope, shape="f32[4]", size=16, reads=("x",))


def test_every_launch_is_in_exactly_one_cell(comparison: Comparison):
    for result in comparison.strategies:
        if result.analysis is None:
            continue
        cells = [cell for row in comparison.rows for cell in row.cells if cell.strategy == result.name]
        assert sorted(index for cell in cells for index in cell.launches) == list(range(len(result.analysis.launches)))
        assert sum(cell.bytes for cell in cells) == result.analysis.traffic.bytes
        assert sum(cell.roofline_us for cell in cells) == pytest.approx(result.analysis.roofline_us)


def test_rows_have_one_cell_for_each_analysed_strategy(comparison: Comparison):
    for row in comparison.rows:
        assert [cell.strategy for cell in row.cells] == ["unfused", "xla", "xla_cudnn", "pallas"]


def test_a_scope_without_a_launch_names_the_launch_that_does_its_work(comparison: Comparison):
    row = next(row for row in comparison.rows if row.scope == "block/attention_residual")
    cells = {cell.strategy: cell for cell in row.cells}
    assert cells["xla"].launches == ()
    assert cells["xla"].bytes == 0
    host = XLA_STEPS[cells["xla"].fused_into[0]]
    assert host.name == "input_add_reduce_fusion"
    assert PALLAS_STEPS[cells["pallas"].fused_into[0]].name == "rms_norm.1"
    assert cells["unfused"].fused_into == ()


def test_rows_follow_the_program_when_strategies_disagree():
    first = _result("first", _step("a"), _step("c"), _step("d"))
    second = _result("second", _step("a"), _step("b"), _step("d"), _step("e"))
    rows = compare_analyses("t", [first, second], "first").rows
    order = [row.scope for row in rows]
    assert order.index("a") < order.index("b") < order.index("d") < order.index("e")
    assert order.index("a") < order.index("c") < order.index("d")


def test_phases_are_apart():
    analysis = analysis_of((_step("a"), _step("a")), "s")
    backward = replace(analysis.launches[1], phase="backward", scopes=(("a", "backward"),))
    launches = (analysis.launches[0], backward)
    result = StrategyResult(name="s", description="", analysis=replace(analysis, launches=launches))
    rows = compare_analyses("t", [result], "s").rows
    assert [(row.scope, row.phase, row.cells[0].launches) for row in rows] == [
        ("a", "forward", (0,)),
        ("a", "backward", (1,)),
    ]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="expected the baseline among"):
        compare_analyses("t", [_result("a", _step("s"))], "b")
    with pytest.raises(ValueError, match="one result a strategy"):
        compare_analyses("t", [_result("a", _step("s")), _result("a", _step("s"))], "a")


def test_no_strategies_analysed_gives_no_rows():
    failed = StrategyResult(name="a", description="", analysis=None, error="no")
    assert compare_analyses("t", [failed], "a").rows == ()


def test_launches_without_a_scope_are_aligned_by_source_line():
    def result(name: str, *lines: str | None) -> StrategyResult:
        analysis = analysis_of((_step(""),) * len(lines), name)
        launches = tuple(replace(launch, source=line) for launch, line in zip(analysis.launches, lines, strict=True))
        return StrategyResult(name=name, description="", analysis=replace(analysis, launches=launches))

    first, second = result("first", "f.py:1", "f.py:2", "f.py:2", None), result("second", "f.py:1", "f.py:3")
    rows = compare_analyses("t", [first, second], "first").rows
    assert {row.scope: tuple(cell.launches for cell in row.cells) for row in rows} == {
        "f.py:1": ((0,), (0,)),
        "f.py:2": ((1, 2), ()),
        "f.py:3": ((), (1,)),
        "": ((3,), ()),
    }
    assert rows[-1].scope == ""
