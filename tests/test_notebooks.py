"""Every notebook runs without a GPU, and the kept one says what its source says today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "notebooks").glob("[0-9]*.py"))


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runner():
    return script("run_notebooks")


@pytest.mark.slow
@pytest.mark.drawn(1 / 7)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_what_is_kept_is_what_it_gives(runner, source, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    changes = runner.difference(runner.run(source), source.with_suffix(".ipynb"))
    assert not changes, f"run `make notebooks`:\n{changes}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_kept_notebook(runner, source):
    kept = source.with_suffix(".ipynb")
    assert kept.stat().st_size < runner.MOST_BYTES
    notebook = nbformat.read(kept, as_version=4)
    assert 15 <= len(notebook.cells) <= 28
    assert "**Needs**" in notebook.cells[0].source
    assert not [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if output.get("name") == "stderr"
    ]
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in runner.jupytext.read(source).cells]


def test_each_is_listed():
    text = (ROOT / "notebooks/README.md").read_text(encoding="utf-8")
    assert not [source.name for source in SOURCES if f"({source.stem}.ipynb)" not in text]
