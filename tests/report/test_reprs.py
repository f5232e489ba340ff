"""What records look like in a terminal, a notebook and a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from hlo_analysis.records import Analysis, Comparison
from hlo_analysis.tables import table_rows, to_dataframe
from tests.report.examples import llama_comparison, with_times


@pytest.fixture(scope="module")
def timed() -> Comparison:
    return with_times(llama_comparison())


@pytest.fixture(scope="module")
def xla(timed: Comparison) -> Analysis:
    analysis = timed["xla"].analysis
    assert analysis is not None
    return analysis


def _records(value: Any) -> Iterator[Any]:
    if is_dataclass(value):
        yield value
        for field in fields(value):
            yield from _records(getattr(value, field.name))
    elif isinstance(value, tuple):
        for each in value:
            yield from _records(each)


def test_no_record_fills_the_screen(timed: Comparison):
    long = {type(record).__name__: repr(record) for record in _records(timed) if len(repr(record)) > 200}
    assert long == {}


def test_reprs_say_what_matters(xla: Analysis):
    decision = next(each for each in xla.decisions if each.producer == "gemm_fusion_dot.2")
    assert repr(decision).startswith("Decision(gemm_fusion_dot.2 → softmax_fusion, rejected by priority-fusion")
    assert repr(decision).endswith(": 'Fusing costs more than it saves')")
    first = xla.missed[0]
    assert repr(first).startswith("MissedFusion(1. 'gemm_fusion_dot.2', #4 → #5: ")
    assert f"{first.bytes_at_stake:,} bytes, {first.remaining_us:.1f} us; {first.remedy_kind}: " in repr(first)
    assert repr(xla.launches[5].inputs[0]) == (
        "Value('gemm_fusion_dot.2' of #4, bf16[2,32,4096,4096], 2,147,483,648 bytes)"
    )
    assert "h200" in repr(xla.provenance)


def test_a_notebook_shows_the_verdict(timed: Comparison, xla: Analysis):
    assert "XLA makes 13 launches" in timed._repr_html_()
    text = xla._repr_html_()
    assert "XLA makes 13 launches" in text
    assert text.count("<tr") == 2
    assert "pallas" not in text


def test_rows_of_a_table(xla: Analysis):
    rows = table_rows(xla)
    assert [row["index"] for row in rows] == list(range(13))
    assert rows[5]["opcodes"] == "multiply 3, convert 2, reduce 1"
    assert rows[5]["inputs"] == len(xla.launches[5].inputs)
    assert "hlo" not in rows[0]
    assert sum(row["bytes_read"] + row["bytes_written"] for row in rows) == xla.traffic.bytes
    assert [row["rank"] for row in table_rows(xla, "missed")] == [each.rank for each in xla.missed]
    assert [row["cause"] for row in table_rows(xla, "hotspots")] == [each.cause for each in xla.hotspots]
    assert len(table_rows(xla, "decisions")) == len(xla.decisions)
    with pytest.raises(ValueError, match="expected a table of launches, decisions, missed, hotspots, got 'launch'"):
        table_rows(xla, "launch")  # pyright: ignore[reportArgumentType]


def test_a_dataframe_is_what_pandas_makes_of_the_rows(xla: Analysis, monkeypatch: pytest.MonkeyPatch):
    class Frame:
        def __init__(self, rows: list[dict[str, Any]]) -> None:
            self.rows, self.index = rows, ""

        def set_index(self, name: str) -> Frame:
            self.index = name
            return self

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=Frame))
    frame = to_dataframe(xla, "missed")
    assert (frame.rows, frame.index) == (table_rows(xla, "missed"), "rank")
    assert to_dataframe(xla, "decisions").index == ""


def test_without_pandas_the_error_says_what_to_do(xla: Analysis, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas; or take hlo_analysis"):
        to_dataframe(xla)
