"""The summaries of tests/gpu and compute-sanitizer, and what README says of them."""

from __future__ import annotations

import pytest

from xlafuse.bench import gpu_checks
from xlafuse.bench.environment import commit
from xlafuse.bench.results import ResultsError

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="4" time="12.34">
<testcase classname="tests.gpu" name="test_a[x]" time="1"/>
<testcase classname="tests.gpu" name="test_a[y]" time="1"><failure message="AssertionError: off&#10;by 2">x</failure>
</testcase>
<testcase classname="tests.gpu" name="test_b" time="1"><error message="failed on setup">x</error></testcase>
<testcase classname="tests.gpu" name="test_c" time="1"><skipped message="no GPU">x</skipped></testcase>
</testsuite></testsuites>
"""


def test_pytest_report_is_counted_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_checks, "gpu_state", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setenv("XLAFUSE_COMMIT", "abc1234")
    (tmp_path / "tests.xml").write_text(REPORT)
    summary = gpu_checks.summarize(tmp_path / "tests.xml")
    assert (summary.passed, summary.failed, summary.skipped, summary.seconds) == (1, 2, 1, 12.3)
    assert summary.failures == ("test_a[y]: AssertionError: off", "test_b: failed on setup")
    gpu_checks.write_summary(tmp_path / "kept.json", summary)
    kept = gpu_checks.load(tmp_path / "kept.json")
    text = gpu_checks.markdown(kept, None)
    assert text.startswith(f"`tests/gpu` on one NVIDIA H200, {summary.date[:10]}, commit abc1234: 1 passed, 2 failed")
    assert "Failed: test_b: failed on setup." in text
    with pytest.raises(ResultsError, match="expected pytest's XML report"):
        gpu_checks.summarize(tmp_path / "nothing.xml")


def test_sanitizer_is_told_without_the_planted_fault():
    def text_of(*outcomes):
        rows = [
            {"operation": name, "status": status, "cases": ["forward a", "backward a"]} for name, status in outcomes
        ]
        document = {"device": "", "date": "2026-01-01T00:00Z", "commit": "", "outcomes": rows}
        return gpu_checks.markdown(None, document)

    text = text_of(("planted fault", "faults"), ("rope", "clean"), ("softmax", "clean"))
    assert "on one unnamed GPU, 2026-01-01: memcheck over 4 forward and backward calls of 2 operations clean." in text
    text = text_of(("planted fault", "faults"), ("softmax", "faults"), ("rope", "failed"))
    assert "memcheck over 4 forward and backward calls of 2 operations reports faults of `softmax`" in text
    assert "as far as the tool came (it died in other calls of `rope`)" in text
    assert "did not see" not in text
    text = text_of(("planted fault", "clean"), ("rope", "clean"))
    assert "of 1 operations clean, but it did not see the planted fault." in text
    assert gpu_checks.markdown(None, None) == "Not run yet."


def test_commit_is_what_the_environment_says_else_gits(monkeypatch, tmp_path):
    monkeypatch.setenv("XLAFUSE_COMMIT", "named")
    assert commit() == "named"
    monkeypatch.delenv("XLAFUSE_COMMIT")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == ""
