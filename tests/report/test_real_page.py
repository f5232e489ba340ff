"""A page made of a real comparison, compiled for an H200 that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hlo_analysis.report import render_html
from tests.report.browser import Browser, Page


@pytest.mark.slow
def test_a_compiled_block_makes_a_page_without_complaint(browser: Browser, tmp_path: Path):
    pytest.importorskip("jax_cuda13_plugin")
    from xlafuse.comparison import compare

    comparison = compare("tiny", (1, 128), strategies=("xla", "pallas"), numerics=False)
    assert all(strategy.error is None for strategy in comparison.strategies)
    path = tmp_path / "report.html"
    path.write_text(render_html(comparison), encoding="utf-8")
    page = Page(browser, path, width=400)
    for strategy in comparison.strategies:
        assert strategy.analysis is not None
        page.choose("#focus", strategy.name)
        page.click("#unfold-all")
        assert page.count("#graph-view .node") == len(strategy.analysis.launches)
        assert page.count("#launch-table tbody tr") == len(strategy.analysis.launches)
        page.click("input[name=verdict][value=all]")
        assert page.text("#decision-count").endswith(f"of {len(strategy.analysis.decisions):,}")
        assert page.run("document.documentElement.scrollWidth") <= 400
    assert page.complaints() == []
