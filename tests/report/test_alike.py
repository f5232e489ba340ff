"""Strategies under which XLA makes the same program are one row in every view."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from hlo_analysis.diff import compare_analyses
from hlo_analysis.records import Comparison
from hlo_analysis.report import render_html, render_markdown, render_terminal
from hlo_analysis.report.alike import distinct


def with_twins(comparison: Comparison) -> Comparison:
    """xla three times: under two more names, with other names of launches, and one launch larger."""
    xla = comparison["xla"]
    assert xla.analysis is not None
    renamed = tuple(replace(each, name=f"{each.name}.7", kernel="k") for each in xla.analysis.launches)
    larger = (replace(renamed[0], bytes_read=renamed[0].bytes_read + 2), *renamed[1:])
    others = [
        replace(xla, name=name, analysis=replace(xla.analysis, label=name, launches=launches))
        for name, launches in (("xla_twin", renamed), ("xla_larger", larger))
    ]
    return compare_analyses(comparison.title, [others[0], *comparison.strategies, others[1]], "xla", unfused="unfused")


def test_the_baseline_stands_for_its_twin_and_names_it(comparison: Comparison):
    found = distinct(with_twins(comparison))
    assert [each.name for each in found.strategies] == [*(each.name for each in comparison.strategies), "xla_larger"]
    assert found["xla"].description.endswith("The same program: xla_twin.")
    assert {cell.strategy for row in found.rows for cell in row.cells} >= {"xla", "xla_larger"}
    assert "xla_twin" not in {cell.strategy for row in found.rows for cell in row.cells}
    assert distinct(comparison) == comparison


def test_every_view_has_one_row(comparison: Comparison):
    made = with_twins(comparison)
    console = Console(file=io.StringIO(), width=120)
    render_terminal(made, console)
    assert isinstance(console.file, io.StringIO)
    for text in (console.file.getvalue(), render_markdown(made)):
        rows = [line for line in text.splitlines() if line.strip(" |").startswith("xla_")]
        assert any("xla_larger" in row for row in rows)
        assert not any("xla_twin" in row for row in rows if "makes" not in row)
        assert "xla_twin makes the same program as xla." in text
    assert "<b>xla_<wbr>twin</b>" not in render_html(made)
