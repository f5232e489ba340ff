from __future__ import annotations

import pytest

from hlo_analysis.records import Comparison
from hlo_analysis.report import render_notebook, show


def test_it_is_small_and_says_the_verdict(comparison: Comparison):
    text = render_notebook(comparison)
    assert len(text) < 12_000
    assert "XLA makes 13 launches" in text
    assert "no analysis: XLA said: INTERNAL: no such thing" in text
    assert text.count("<tr") == 1 + len(comparison.strategies)
    assert "<script" not in text
    assert "<style" not in text


def test_show_gives_what_a_cell_displays(comparison: Comparison):
    pytest.importorskip("IPython")
    assert show(comparison).data == render_notebook(comparison)
