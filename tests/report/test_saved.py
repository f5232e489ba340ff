"""Analyses and comparisons in files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from hlo_analysis.errors import DumpError
from hlo_analysis.records import Analysis
from hlo_analysis.saved import load, save
from tests.report.examples import llama_comparison


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    found = llama_comparison()["xla"].analysis
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_what_is_saved_is_loaded(analysis: Analysis, tmp_path: Path, name: str):
    path = save(analysis, tmp_path / name)
    assert load(path) == analysis
    assert path.read_bytes()[:2] == (b"\x1f\x8b" if name.endswith(".gz") else b"{\n")
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_equal_analyses_are_equal_files(analysis: Analysis, tmp_path: Path):
    one, other = save(analysis, tmp_path / "one.json.gz"), save(analysis, str(tmp_path / "other.json.gz"))
    assert one.read_bytes() == other.read_bytes()


def test_a_comparison_too(tmp_path: Path):
    path = save(llama_comparison(), tmp_path / "report.json")
    assert load(path) == llama_comparison()


def test_bad_names_and_places(analysis: Analysis, tmp_path: Path):
    with pytest.raises(DumpError, match=r"ends in \.json or \.json\.gz, got 'a\.zip'"):
        save(analysis, tmp_path / "a.zip")
    with pytest.raises(DumpError, match="cannot save to"):
        save(analysis, tmp_path / "absent" / "a.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"3", "is not JSON"),
        (b'{"schema_version": 0}', "expected Analysis JSON of schema version"),
        (gzip.compress(b"{}", mtime=0)[:-9], "cannot read"),
    ],
)
def test_files_that_are_no_analysis(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / ("a.json.gz" if content[:1] == b"\x1f" else "a.json")
    path.write_bytes(content)
    with pytest.raises(DumpError, match=message):
        load(path)
