"""A rule of the analyzer that raises: a note on it in every view, the other findings, and the error where strict."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hlo_analysis import Analysis, Comparison, analysis, analyze, caveats, missed, to_json
from hlo_analysis.capture import Capture
from hlo_analysis.catalogue import Kernel
from hlo_analysis.decisions import table
from hlo_analysis.program import launch_rows
from hlo_analysis.records import StrategyResult
from hlo_analysis.remedies import vertical
from hlo_analysis.report import render_html, render_terminal
from hlo_analysis.rules import STRICT, attempt

NORM = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%squares (p: f32[4096,8192]) -> f32[4096] {
  %p = f32[4096,8192]{1,0} parameter(0)
  %z = f32[] constant(0)
  %m = f32[4096,8192]{1,0} multiply(%p, %p)
  ROOT %r = f32[4096]{0} reduce(%m, %z), dimensions={1}, to_apply=%add
}

%scaled (p: f32[4096,8192], r: f32[4096]) -> f32[4096,8192] {
  %p = f32[4096,8192]{1,0} parameter(0)
  %r = f32[4096]{0} parameter(1)
  %q = f32[4096]{0} rsqrt(%r)
  %b = f32[4096,8192]{1,0} broadcast(%q), dimensions={0}
  ROOT %m = f32[4096,8192]{1,0} multiply(%p, %b)
}

ENTRY %main (x: f32[4096,8192]) -> f32[4096,8192] {
  %x = f32[4096,8192]{1,0} parameter(0)
  %sums = f32[4096]{0} fusion(%x), kind=kInput, calls=%squares
  ROOT %norm = f32[4096,8192]{1,0} fusion(%x, %sums), kind=kLoop, calls=%scaled
}
"""


def broken(*_: Any, **__: Any) -> Any:
    raise KeyError("nobody wrote this")


def refuses(_: Any) -> str | None:
    raise ValueError("of a shape that\nI did not expect")


@pytest.fixture
def analysis_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Analysis]:
    (tmp_path / "module_0001.jit_f.sm_9.0a_gpu_after_optimizations.txt").write_text(NORM)

    def analysis_of(*, strict: bool = False, **options: Any) -> Analysis:
        monkeypatch.setenv(STRICT, "1" if strict else "0")
        return analyze(Capture.load(tmp_path), **options)

    return analysis_of


def failures(found: Analysis) -> list[str]:
    return [note for note in found.provenance.notes if "findings are missing" in note]


def test_a_rule_that_raises_costs_its_findings_alone(analysis_of, monkeypatch):
    whole = analysis_of()
    assert not failures(whole)
    assert [found.remedy_kind for found in whole.missed] == ["kernel"]
    monkeypatch.setattr(missed, "_RULES", (broken, *missed._RULES))
    found = analysis_of()
    (note,) = failures(found)
    assert "The rule broken failed (KeyError: 'nobody wrote this', at test_rules.py:" in note
    assert found.missed == whole.missed


@pytest.mark.parametrize(
    ("room", "rule"),
    [
        (missed.program, "attention_scores"),
        (vertical, "of_rows"),
        (caveats, "_spills"),
        (analysis, "_memory"),
        (table, "read_log"),
        (table, "edges_inside"),
        (table.UnfusedEdges, "explain"),
    ],
)
def test_every_kind_of_rule_may_raise(analysis_of, monkeypatch, room, rule):
    monkeypatch.setattr(room, rule, broken)
    found = analysis_of()
    assert len(failures(found)) == 1
    assert [launch.name for launch in found.launches] == ["sums", "norm"]
    assert found.missed
    with pytest.raises(KeyError):
        analysis_of(strict=True)


def test_a_launch_whose_cost_raises_is_listed_without_traffic(analysis_of, monkeypatch):
    monkeypatch.setattr(launch_rows, "flops_of", broken)
    found = analysis_of()
    assert len(failures(found)) == 1
    assert [(launch.name, launch.bytes_read) for launch in found.launches] == [("sums", 0), ("norm", 0)]


def test_the_check_of_somebody_elses_kernel_may_raise(analysis_of):
    kernel = Kernel(name="their_norm", pattern="rms_norm", package="theirs", unsupported=refuses)
    found = analysis_of(catalogue=(kernel,))
    (note,) = failures(found)
    assert "their_norm.refusal failed (ValueError: of a shape that I did not expect, at test_rules.py:" in note
    assert "their_norm does not take this: its check of these launches failed" in found.missed[0].remedy
    with pytest.raises(ValueError, match="I did not expect"):
        analysis_of(catalogue=(kernel,), strict=True)


def test_the_note_is_in_every_view(analysis_of, monkeypatch):
    monkeypatch.setattr(missed, "_RULES", (broken,))
    found = analysis_of(label="f")
    only = StrategyResult(name="f", description="", analysis=found)
    comparison = Comparison(title="f", baseline="f", strategies=(only,))
    terminal = io.StringIO()
    render_terminal(comparison, Console(file=terminal, width=200))
    for text in (to_json(found), render_html(comparison), terminal.getvalue()):
        assert "The rule broken failed" in text


def test_outside_of_an_analysis_a_rule_raises():
    with pytest.raises(KeyError):
        attempt(broken, None)
