"""What the sanitizer's script makes of the tool's words, and which calls it runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pallas_kernels import REGISTRY

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/sanitize.py"

CLEAN = """========= COMPUTE-SANITIZER
CASE forward a
CASE backward a
CASE end
========= ERROR SUMMARY: 0 errors
"""
READ = """========= COMPUTE-SANITIZER
CASE forward a
========= Invalid __global__ read of size 4 bytes
=========     at softmax_mosaic_gpu_kernel+0xb0 in x.py:229
=========     by thread (64,0,0) in block (0,0,0)
JaxRuntimeError: INTERNAL
========= ERROR SUMMARY: 1 error
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sanitized(script, monkeypatch):
    """Reads what processes of an operation print, one after the other; returns the outcome and the cases skipped."""

    def run(*texts, operation="rope"):
        left, skipped = list(texts), []

        def printed(operation, skip, seconds):
            skipped.append(skip)
            return left.pop(0)

        monkeypatch.setattr(script, "printed", printed)
        return script.sanitize(operation, script.argparse.Namespace(seconds=60.0)), skipped

    return run


def test_clean_is_all_calls_run_and_no_report(script, sanitized):
    found, _ = sanitized(CLEAN)
    assert (found["status"], found["cases"]) == ("clean", ["forward a", "backward a"])
    assert script.line(found) == "rope                   clean   2 cases, 0 s"
    assert script.is_as_wanted(found)


def test_reports_are_told_with_kernel_and_call_and_others_kernels_apart(script, sanitized):
    others = READ.replace("CASE forward a", "CASE backward a").replace(
        "softmax_mosaic_gpu_kernel", "input_reduce_fusion"
    )
    found, _ = sanitized(others + READ.split("\n", 1)[1], operation="softmax")
    assert found["status"] == "faults"
    assert [(f["kernel"], f["case"]) for f in found["findings"]] == [
        ("input_reduce_fusion", "backward a"),
        ("softmax_mosaic_gpu_kernel", "forward a"),
    ]
    text = script.line(found)
    assert "    forward a: softmax_mosaic_gpu_kernel: Invalid __global__ read of size 4 bytes at softmax" in text
    assert "input_reduce_fusion" not in text
    finished = others.replace("JaxRuntimeError: INTERNAL", "CASE end")
    assert sanitized(finished)[0]["status"] == "clean"


def test_a_planted_fault_must_be_seen(script, sanitized):
    planted, _ = sanitized(READ, operation=script.PLANTED)
    assert script.is_as_wanted(planted)
    assert "seen, as it must be" in script.line(planted)
    missed, _ = sanitized(CLEAN, operation=script.PLANTED)
    assert not script.is_as_wanted(missed)
    assert "NOT SEEN" in script.line(missed)


@pytest.mark.parametrize(
    ("texts", "skipped", "status", "died"),
    [
        (("CASE a\nCASE b", "CASE b\nCASE c\nCASE end"), [0, 1], "clean", []),
        (("CASE a\nCASE b", "CASE b", "CASE c\nCASE end"), [0, 1, 2], "failed", ["b"]),
        (("CASE a\nCASE b", "CASE b\nCASE c", "CASE c\nCASE end"), [0, 1, 2], "clean", []),
        (("",) * 8, [0, 0, 1, 1, 2, 2, 3, 3], "failed", ["start"] * 4 + ["the cases after it"]),
    ],
)
def test_a_case_the_tool_dies_of_is_run_again_once_and_then_left_out(sanitized, texts, skipped, status, died):
    found, asked = sanitized(*texts)
    assert (asked, found["status"], found["died"]) == (skipped, status, died)


def test_every_kind_of_call_is_run_once(script):
    for op in REGISTRY.values():
        specs = script.one_of_each_kind(op)
        kinds = {(spec.arguments[op.batched[0]].dtype, spec.tags, frozenset(spec.arguments)) for spec in specs}
        assert len(kinds) == len(specs) > 0
