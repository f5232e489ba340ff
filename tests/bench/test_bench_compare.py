"""`xlafuse bench compare`: what moved between two files of results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_bench_results import H200, measured, results, shape
from typer.testing import CliRunner

from xlafuse.bench.compare import compare
from xlafuse.bench.results import write
from xlafuse.cli import app


def slower(us: float, spread: float = 0.0):
    """The shape with our kernel at so many microseconds."""
    made = measured("mosaic", "implementation", us)
    made = replace(made, timing=replace(made.timing, p20_us=us - spread, p80_us=us + spread))
    base = shape()
    return replace(base, candidates=tuple(made if each.name == "mosaic" else each for each in base.candidates))


@pytest.mark.parametrize(("us", "spread", "expected"), [(254, 0, 0), (256, 0, 1), (256, 7, 0), (240, 0, 1)])
def test_a_move_is_more_than_noise(us: float, spread: float, expected: int):
    lines, _ = compare(results(slower(250)), results(slower(us, spread)))
    assert lines[-1].startswith(f"4 compared, {expected} moved")
    assert len(lines) == 1 + expected


def test_the_last_measurement_of_a_shape_counts():
    old, new = results(slower(300), slower(250)), results(slower(250))
    assert len(compare(old, new)[0]) == 1


def test_the_command(tmp_path: Path):
    def run(old, new):
        write(tmp_path / "old.json", old)
        write(tmp_path / "new.json", new)
        return CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json")])

    same = run(results(slower(250)), results(slower(250)))
    assert (same.exit_code, same.stdout) == (0, "4 compared, 0 moved beyond noise, 0 of ours slower\n")
    faster = run(results(slower(250)), results(slower(200)))
    assert faster.exit_code == 0
    assert "-20.0%  (xla +0.0%)" in faster.stdout
    worse = run(results(slower(250)), results(slower(275)))
    assert worse.exit_code == 1
    assert "SLOWER" in worse.stdout
    # Another library's is no regression of ours.
    peers = replace(shape(), candidates=tuple(replace(each, kind="peer") for each in slower(250).candidates))
    assert run(results(shape()), results(replace(peers, candidates=peers.candidates[1:2]))).exit_code == 0

    elsewhere = run(results(shape()), results(shape(), environment=replace(H200, device_kind="NVIDIA H100")))
    assert elsewhere.exit_code == 2
    assert "expected one kind of GPU" in elsewhere.stderr
    assert run(results(shape("a")), results(shape("b"))).exit_code == 2
    (tmp_path / "new.json").write_text("{")
    cut = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json")])
    assert cut.exit_code == 2
