"""README's results table says what the kept results say, and results as text and table."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from xlafuse.bench.results import load
from xlafuse.bench.table import BEGIN, END, markdown, place

ROOT = Path(__file__).resolve().parents[1]
KEPT = sorted((ROOT / "notebooks/results").glob("kernels-*.json"))


def test_readme_table_is_current():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if not (ROOT / "notebooks/results/kernels-h200.json").is_file() or BEGIN not in readme:
        pytest.skip("no kept results, or no place for them in the README")
    table = markdown(load(ROOT / "notebooks/results/kernels-h200.json"))
    assert place(readme, table) == readme, "run `make results`"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_kept_results_are_whole(path):
    results = load(path)
    assert results.shapes
    for shape in results.shapes:
        assert shape.ceiling in [c.name for c in shape.of_kind("ceiling")]
        assert all(c.timing.p20_us <= c.timing.median_us <= c.timing.p80_us for c in shape.candidates)
        for ceiling in shape.of_kind("ceiling"):
            assert len(ceiling.timing.kernels) == 1


def test_script_is_importable():
    spec = importlib.util.spec_from_file_location("write_results", ROOT / "scripts/write_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.README, module.KEPT.name) == (ROOT / "README.md", "kernels-h200.json")
    assert END != BEGIN
