"""The report as Markdown: the page's order, and code that can be copied from an issue."""

from __future__ import annotations

import re

from hlo_analysis.records import Comparison
from hlo_analysis.report import render_markdown, verdict
from tests.report.examples import CODE, full_comparison


def test_it_has_the_pages_order_and_its_code():
    text = render_markdown(full_comparison())
    heads = re.findall(r"^#{3,4} (.*)$", text, re.MULTILINE)
    assert heads[1:] == ["What to do", "Where the time goes", "Strategies"]
    first = text.index("1. **attention**, block.py:104: −1.73 ms (25 %), −6.4 GB, −2 launches (verified)")
    assert text.index(verdict(full_comparison()).split(" On an ")[0]) < first < text.index("Where the time goes")
    assert CODE.splitlines()[-1] in text
    assert "tried: compiler option xla_gpu_experimental_fuse=true: no gain" in text


def test_tables_have_a_cell_for_each_column(comparison: Comparison):
    text = render_markdown(comparison)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {5, 7}
    assert text == comparison.to_markdown()
    analysis = comparison["xla"].analysis
    assert analysis is not None
    assert "| xla | 13 |" in analysis.to_markdown()
    assert analysis.to_html().startswith("<!doctype html>")
