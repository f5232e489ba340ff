"""A page made of a real comparison, compiled for an H200 that is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hlo_analysis.records import Comparison
from hlo_analysis.report import render_html
from hlo_analysis.saved import load
from tests.report.browser import Browser, Page


@pytest.mark.slow
def test_a_compiled_block_makes_a_page_without_complaint(browser: Browser, tmp_path: Path):
    """REPORT names what `make report` compared, as in `.ci/run`; to compile a small block takes 14 s of CPU time."""
    pytest.importorskip("jax_cuda13_plugin")
    from xlafuse.comparison import compare

    names = ("xla", "pallas")
    file = os.environ.get("REPORT")
    comparison = load(file) if file else compare("tiny", (1, 128), strategies=names, numerics=False)
    assert isinstance(comparison, Comparison)
    assert all(strategy.error is None for strategy in comparison.strategies)
    path = tmp_path / "report.html"
    path.write_text(render_html(comparison), encoding="utf-8")
    page = Page(browser, path, width=400)
    for strategy in map(comparison.__getitem__, names):
        assert strategy.analysis is not None
        page.choose("#focus", strategy.name)
        page.click("#unfold-all")
        assert page.count("#graph-view .node") == len(strategy.analysis.launches)
        assert page.count("#launch-table tbody tr") == len(strategy.analysis.launches)
        page.click("input[name=verdict][value=all]")
        assert page.text("#decision-count").endswith(f"of {len(strategy.analysis.decisions):,}")
        assert page.run("document.documentElement.scrollWidth") <= 400
    assert page.complaints() == []
