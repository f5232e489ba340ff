"""What the sanitizer's script makes of the tool's words, and which calls it runs."""

from __future__ import annotations

import importlib.util
import math
import sys
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
    sys.modules["sanitize"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sanitize"]


def test_clean_is_all_calls_run_and_no_report(script):
    found = script.outcome("rope", CLEAN, 0, 3.0)
    assert (found.status, found.cases, found.summary) == (
        "clean",
        ("forward a", "backward a"),
        "ERROR SUMMARY: 0 errors",
    )
    assert script.line(found) == "rope                   clean   2 cases, 3 s"
    assert script.is_as_wanted(found)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [(CLEAN.replace("CASE end", "Error: off"), 1, "ended with exit code 1; ERROR SUMMARY: 0 errors; its last words: E"),
     (CLEAN.replace("CASE end\n", ""), 0, "ended with exit code 0"), ("", None, "ran out of time; no summary")],
)  # fmt: skip
def test_what_did_not_finish_has_failed(script, text, code, words):
    found = script.outcome("rope", text, code)
    assert found.status == "failed"
    assert found.summary.startswith(words)
    assert not script.is_as_wanted(found)


def test_reports_are_told_with_kernel_and_call_and_others_kernels_apart(script):
    others = READ.replace("CASE forward a", "CASE backward a").replace(
        "softmax_mosaic_gpu_kernel", "input_reduce_fusion"
    )
    found = script.outcome("softmax", READ + others.split("\n", 1)[1], 1)
    assert found.status == "faults"
    assert [(f.kernel, f.case, f.is_ours) for f in found.findings] == [
        ("softmax_mosaic_gpu_kernel", "forward a", True),
        ("input_reduce_fusion", "backward a", False),
    ]
    text = script.line(found)
    assert "1 reports of kernels that are not ours" in text
    assert "    forward a: softmax_mosaic_gpu_kernel: Invalid __global__ read of size 4 bytes at softmax" in text
    finished = others.replace("JaxRuntimeError: INTERNAL", "CASE end")
    assert script.outcome("softmax", finished, 0).status == "clean"


def test_memory_errors_are_faults_and_planted_ones_must_be(script):
    found = script.outcome("softmax", READ, 1)
    assert (found.status, found.findings[0].kernel) == ("faults", "softmax_mosaic_gpu_kernel")
    planted = script.outcome(script.PLANTED, READ, 1)
    assert script.is_as_wanted(planted)
    assert "seen, as it must be" in script.line(planted)
    missed = script.outcome(script.PLANTED, CLEAN, 0)
    assert not script.is_as_wanted(missed)
    assert "NOT SEEN" in script.line(missed)


@pytest.mark.parametrize(
    ("deaths", "skips", "status", "died"),
    [((), [0], "clean", ()), ((1,), [0, 1], "clean", ()), ((1, 1), [0, 1, 2], "failed", ("b",))],
)
def test_a_case_the_tool_dies_of_is_run_again_once_and_then_left_out(script, monkeypatch, deaths, skips, status, died):
    cases, left, asked = ("a", "b", "c"), list(deaths), []

    def process(operation, options, skip, seconds):
        asked.append(skip)
        last = left.pop() if left else None
        lines = [f"CASE {case}" for case in cases[skip : None if last is None else last + 1]]
        lines += ["CASE end", "========= ERROR SUMMARY: 0 errors"] if last is None else []
        return script.outcome(operation, "\n".join(lines), 0 if last is None else -11)

    monkeypatch.setattr(script, "_sanitize", process)
    found = script.sanitize("rope", script.argparse.Namespace(seconds=60.0))
    assert (asked, found.status, found.died, found.cases) == (skips, status, died, cases)


def test_every_kind_of_call_is_run_with_as_many_rows_as_the_tool_can_take(script):
    for op in REGISTRY.values():
        specs = script.one_of_each_kind(op)
        assert len(
            {(spec.arguments[op.batched[0]].dtype, spec.tags, frozenset(spec.arguments)) for spec in specs}
        ) == len(specs)
        assert specs
        for spec in specs:
            cut = script.shortened(op, spec, 1 << 20)
            before, after = (s.arguments[op.batched[0]].shape for s in (spec, cut))
            assert after[-1] == before[-1]
            assert len(after) != 2 or math.prod(after) <= 1 << 20
            if cut is not spec:
                rows = {cut.arguments[n].shape[0] for n in op.batched if cut.arguments.get(n) is not None}
                assert rows == {after[0]}
