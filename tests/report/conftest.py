from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hlo_analysis.records import Comparison
from hlo_analysis.report import render_html
from tests.report.browser import CHROMIUM, Browser
from tests.report.examples import full_comparison, hostile_comparison, llama_comparison


@pytest.fixture(scope="session")
def comparison() -> Comparison:
    return llama_comparison()


@pytest.fixture(scope="session")
def hostile() -> Comparison:
    return hostile_comparison()


@pytest.fixture(scope="session")
def page_file(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_html(comparison), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def full_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything that it can show at once."""
    path = tmp_path_factory.mktemp("full") / "report.html"
    path.write_text(render_html(full_comparison()), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def hostile_file(hostile: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "report.html"
    path.write_text(render_html(hostile), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: install Debian's package 'chromium'")
    with Browser() as running:
        yield running
