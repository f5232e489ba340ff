"""`xlafuse check`: exit codes, what it prints, baselines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from xlafuse.cli.check import parse_bytes

BYTES = 11911905280
"""HBM traffic of xla in the report."""


def test_within_the_limits(invoke, report: str):
    result = invoke("check", "--capture", report, "--max-launches", 13, "--max-hbm-bytes", BYTES)
    assert (result.exit_code, result.stdout) == (0, "ok: xla on h200: 13 launches, 11.9 GB of HBM traffic\n")


def test_too_many_launches_are_listed_with_the_reason(invoke, report: str):
    result = invoke("check", "--capture", report, "--max-launches", 12)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "exceeded: 13 launches, at most 12 (--max-launches)"
    assert lines[1].startswith("  #0 input_reduce_fusion (reduction) at block.py:114 (block/attention_norm)")
    assert lines[1].endswith(": reads what no launch wrote")
    assert lines[6].endswith("apart from #4: priority-fusion: Fusing costs more than it saves")
    assert lines[-1] == "  and 3 more launches"


def test_too_many_bytes_show_the_largest_traffic_first(invoke, report: str):
    result = invoke("check", "--capture", report, "--max-hbm-bytes", BYTES - 1)
    assert result.exit_code == 1
    assert f"({BYTES:,} bytes)" in result.stdout
    assert result.stdout.splitlines()[1].startswith("  #5 softmax_fusion")


def test_a_lock_is_compared_with(invoke, report: str):
    assert invoke("check", "--capture", report, "--write", "lock.json").exit_code == 0
    lock = json.loads(Path("lock.json").read_text())
    assert (lock["launches"], lock["hbm_bytes"], lock["target"]) == (13, BYTES, "h200")
    assert invoke("check", "--capture", report, "--baseline", "lock.json").exit_code == 0
    fewer = lock | {"launches": 12, "versions": lock["versions"] | {"jax": "0.1"}}
    Path("lock.json").write_text(json.dumps(fewer))
    result = invoke("check", "--capture", report, "--baseline", "lock.json")
    assert result.exit_code == 1
    assert "note: version of jax: 0.1 before" in result.stdout
    assert "exceeded: 13 launches, at most 12 (as in lock.json)" in result.stdout


def test_against_a_whole_report_only_what_changed_is_named(invoke, report: str):
    """xla_cudnn has attention in one launch; what comes before it is the same in both."""
    result = invoke("check", "--capture", f"{report}:xla", "--baseline", f"{report}:xla_cudnn")
    assert result.exit_code == 1
    assert "exceeded: 13 launches" in result.stdout
    assert "#5 softmax_fusion" in result.stdout
    assert "#0 input_reduce_fusion" not in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected --max-launches, another --max option, --no-all-gather or --baseline"),
        (
            ["--max-hbm-bytes", "ten"],
            "Invalid value for '--max-hbm-bytes': expected 250000000, 250MB or 1.5GB",
        ),
        (["--baseline", "lock.json"], "cannot read lock.json"),
        (["--baseline", "old.json"], "expected a lock of version 1"),
        (["--baseline", "edited.json"], "not a lock, or one that was edited"),
        (["--baseline", "other.json"], "other.json is of another program: target: h100 before, h200 now"),
        (["--baseline", "renamed.json"], "another program: function: attention before, "),
        (["--baseline", "longer.json"], "another program: arguments: y: f32[9] before, "),
        (["--write", "lock.txt"], "expected --write FILE.json"),
        (["--write", "absent/lock.json"], "no folder absent"),
    ],
)
def test_bad_input(invoke, report: str, words: list[str], message: str):
    Path("old.json").write_text('{"xlafuse_lock": 0}')
    Path("edited.json").write_text('{"xlafuse_lock": 1, "launches": 3}')
    other = {"label": "x", "target": "h100", "mode": "forward", "launches": 1, "hbm_bytes": 1}
    Path("other.json").write_text(json.dumps({"xlafuse_lock": 1, **other, "versions": {}, "options": {}}))
    assert invoke("check", "--capture", report, "--write", "known.json").exit_code == 0
    known = json.loads(Path("known.json").read_text())
    Path("renamed.json").write_text(json.dumps({**known, "function": "attention"}))
    Path("longer.json").write_text(json.dumps({**known, "arguments": ["y: f32[9]"]}))
    result = invoke("check", "--capture", report, *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_function_that_does_not_compile_is_bad_input(invoke, program: tuple[str, ...]):
    result = invoke("check", *program[:2], "--shape", "f32[4]", "--shape", "f32[]", "--max-launches", 1)
    assert result.exit_code == 2


def test_a_function_is_compiled_and_its_source_line_named(invoke, program: tuple[str, ...]):
    result = invoke("check", *program, "--max-launches", 1)
    assert result.exit_code == 1, result.stderr
    assert "at softmax_and_sine.py:7" in result.stdout


@pytest.mark.parametrize(
    ("text", "count"), [("12", 12), ("1_000", 1000), ("1.5GB", 1_500_000_000), ("250 mb", 250_000_000), ("2e3", 2000)]
)
def test_bytes(text: str, count: int):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MB", "-1", "1GiB", "nan"])
def test_no_bytes(text: str):
    with pytest.raises(typer.BadParameter):
        parse_bytes(text)


def test_peak_memory_and_each_value_between_launches_are_limited(invoke, report: str):
    scores = 2 * 32 * 4096 * 4096 * 2
    peak, words = 6 << 30, ("check", "--capture", report)
    assert invoke(*words, "--max-peak-bytes", peak, "--max-value-bytes", scores).exit_code == 0
    result = invoke(*words, "--max-peak-bytes", peak - 1, "--max-value-bytes", "1GB")
    assert result.exit_code == 1
    said = [line for line in result.stdout.splitlines() if line.startswith("exceeded")]
    assert (
        said[0]
        == f"exceeded: 6.4 GB of memory at the peak ({peak:,} bytes), at most 6.4 GB ({peak - 1:,}; --max-peak-bytes)"
    )
    assert len(said) > 1
    assert all("bf16[2,32,4096,4096] (2,147,483,648 bytes), at most 1.0 GB" in line for line in said[1:])
    lines = result.stdout.splitlines()
    at = lines.index(said[1])
    assert lines[at + 1].startswith("  #4 "), "the launch that writes it"
    assert "at most 1.0 TB" not in invoke(*words, "--max-value-bytes", "1TB").stdout


def test_peak_memory_of_a_lock_is_a_limit_if_the_lock_knows_it(invoke, report: str):
    invoke("check", "--capture", report, "--write", "lock.json")
    lock = json.loads(Path("lock.json").read_text())
    assert lock["peak_bytes"] == 6 << 30
    Path("lock.json").write_text(json.dumps(lock | {"peak_bytes": 5}))
    assert "of memory at the peak" in invoke("check", "--capture", report, "--baseline", "lock.json").stdout
    Path("lock.json").write_text(json.dumps({name: value for name, value in lock.items() if name != "peak_bytes"}))
    assert invoke("check", "--capture", report, "--baseline", "lock.json").exit_code == 0
