"""The tables of README and docs/ say what the kept results and the dispatch rules say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from xlafuse.bench.results import load

ROOT = Path(__file__).resolve().parents[1]
KEPT = sorted((ROOT / "notebooks/results").glob("kernels-*.json"))


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("write_results", ROOT / "scripts/write_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_current(script):
    """Of the kept results, and of the operations' dispatch rules."""
    pages = {path: path.read_text(encoding="utf-8") for path in script.PAGES}
    assert script.placed(pages) == pages, "run `make results`"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_kept_results_are_whole(path):
    results = load(path)
    assert results.shapes
    for shape in results.shapes:
        assert shape.ceiling in [c.name for c in shape.of_kind("ceiling")]
        assert all(c.timing.p20_us <= c.timing.median_us <= c.timing.p80_us for c in shape.candidates)
        for ceiling in shape.of_kind("ceiling"):
            assert len(ceiling.timing.kernels) == 1


def test_script_reads_what_is_kept(script):
    files = (script.KEPT, script.TESTS, script.SANITIZER)
    assert all(path.is_file() for path in files)
