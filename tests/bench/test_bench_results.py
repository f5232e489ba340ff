"""Files of results, their lines, and the process that measures."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import textwrap

import pytest

from pallas_kernels import get_op
from xlafuse.bench import supervisor, worker
from xlafuse.bench.environment import Environment
from xlafuse.bench.results import (
    Measured,
    Problem,
    Results,
    ResultsError,
    Run,
    ShapeResult,
    geometric_mean,
    load,
    merge,
    write,
)
from xlafuse.bench.rows import rows
from xlafuse.bench.settings import Settings
from xlafuse.bench.supervisor import BenchError
from xlafuse.bench.text import kernel_lines, kernel_summary, problem_lines
from xlafuse.bench.timing import Timing

H200 = Environment(device_kind="NVIDIA H200", platform_version="cuda 13", python="3.12", packages={"jax": "0.11.2"})


def measured(name, kind, us):
    return Measured(
        name=name, kind=kind, timing=Timing(median_us=us, p20_us=us, p80_us=us, wall_us=us, kernels=("k",), samples=4)
    )


def shape(spec="32768x4096-bfloat16", us=250.0, **more) -> ShapeResult:
    candidates = (
        measured("copy", "ceiling", 245.0),
        measured("xla", "implementation", 500.0),
        measured("mosaic", "implementation", us),
        measured("liger", "peer", 300.0),
        measured("variant: a", "variant", 240.0),
    )
    values = {"op": "rms_norm", "phase": "forward", "bytes": 10**9, "ceiling": "copy", "candidates": candidates}
    return ShapeResult(spec=spec, **{**values, **more})


def day(number: int) -> str:
    """When a run began."""
    return f"2026-01-{number:02}T00:00:00+00:00"


def results(*shapes, started="2026-01-01T00:00:00+00:00", environment=H200, left_out=()) -> Results:
    return Results(
        runs=(Run(started=started, environment=environment, settings={"rounds": 10}, shapes=shapes, left_out=left_out),)
    )


def test_json_comes_back_the_same_and_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "results.json"
    kept = results(shape(), shape("other", problems=(Problem(candidate="liger", message="no"),)))
    write(path, kept)
    assert load(path) == kept
    assert json.loads(path.read_text())["schema_version"] == 2
    with pytest.raises(ValueError, match="Out of range"):
        write(path, results(shape(us=math.nan)))
    assert load(path) == kept
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "expected a file of benchmark results"), ('{"schema_version": 1}', "schema version 1, expected 2"),
     ('{"schema_version": 2, "runs": 3}', "expected a file of benchmark results")],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(tmp_path, text, told):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ResultsError, match=told):
        load(tmp_path / "x.json")


def test_merging_keeps_the_last_measurement_of_a_shape():
    first, second = (
        results(shape(us=260.0), shape("b"), started=day(2)),
        results(shape(us=255.0), started=day(3)),
    )
    merged = merge([first, second])
    assert [(run.started, [s.spec for s in run.shapes]) for run in merged.runs] == [
        (day(2), ["b"]),
        (day(3), ["32768x4096-bfloat16"]),
    ]
    assert merged.runs[1].shapes[0].microseconds("mosaic") == 255.0
    late = results(shape("c"), left_out=("rms_norm forward b: late", "rms_norm forward d: late"))
    assert merge([late, second, first]).runs[0].left_out == ("rms_norm forward d: late",)
    alone = shape(candidates=tuple(c for c in shape(us=255.0).candidates if c.kind != "peer"))
    both = merge([results(shape(us=300.0), started=day(1)), first, results(alone, started=day(4))])
    assert [(run.started, [s.spec for s in run.shapes]) for run in both.runs] == [
        (day(2), ["32768x4096-bfloat16", "b"]),  # the last one with Liger
        (day(4), ["32768x4096-bfloat16"]),
    ]
    assert [c.name for c in both.runs[0].shapes[0].candidates] == ["copy", "xla", "mosaic", "liger"]
    (row, _) = rows(both)
    assert (row.run, row.main.microseconds("mosaic"), row.speed_up("liger")) == (2, 255.0, 300 / 260)
    assert (row.runs_elsewhere(["liger", "triton"]), row.speed_up("xla")) == ({"liger": 1}, 500 / 255)
    assert math.isnan(row.speed_up("triton"))
    other = dataclasses.replace(H200, device_kind="NVIDIA H100")
    with pytest.raises(ResultsError, match="one kind of GPU, got NVIDIA H100, NVIDIA H200"):
        merge([first, results(shape("c"), environment=other)])


def test_a_line_has_time_rate_share_and_ratios():
    first, *variants = kernel_lines(shape(problems=(Problem(candidate="torch_compile", message="a\nb"),)))
    assert first.split() == (
        "fwd 32768x4096-bf16 mosaic 250.00 µs 4000 GB/s 98 % xla 2.00 liger 1.20".split()  # noqa: SIM905
    )
    assert variants == ["      variant: a: 240.00 µs, 1.042 of it"]
    assert problem_lines(shape(problems=(Problem(candidate="t", message="a\nb"),))) == ["      failed: t: a b"]
    assert "not measured" in kernel_lines(shape(candidates=()))[0]


def test_matrix_products_have_teraflops():
    product = shape(spec="8192-4096-4096-bfloat16", us=500.0, op="linear")
    assert "  550 TF/s" in kernel_lines(product)[0]  # 2 * 8192 * 4096 * 4096 operations
    assert "GB/s" in kernel_lines(shape(us=500.0))[0]


def test_summary_has_geometric_means_of_large_shapes():
    small = shape("1x4096", bytes=1000, us=1.0)
    lines = kernel_summary(results(shape(us=250.0), shape("b", us=125.0), small, left_out=("softmax: died",)))
    share = 100 * math.sqrt(245 / 250 * 245 / 125)
    assert lines == [f"rms_norm forward: {share:.0f} % of the ceiling  xla 2.83  liger 1.70  (2 shapes)",
                     "left out: softmax: died"]  # fmt: skip
    assert math.isnan(geometric_mean([]))


def test_worker_measures_and_writes_after_every_shape(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker, "bench_operation", lambda op, settings, sampler: iter([shape(op=op.name), "b: late"]))
    assert worker.measure(["rms_norm"], Settings(), tmp_path) == worker.DONE
    kept = load(tmp_path / "results.json")
    assert kept.runs[0].left_out == ("b: late",)
    assert kept.runs[0].settings["seconds"] is None
    assert kept.runs[0].environment.device_kind == "cpu"
    assert (tmp_path / "progress.txt").read_text() == "rms_norm"
    assert capsys.readouterr().out.startswith("rms_norm\n fwd 32768x4096-bf16")


def test_worker_stops_when_the_gpu_no_longer_answers(tmp_path, monkeypatch):
    broken = shape(problems=(Problem(candidate="mosaic", message="illegal address"),))
    monkeypatch.setattr(worker, "bench_operation", lambda *_: iter([broken, shape("never")]))
    monkeypatch.setattr(worker, "gpu_answers", lambda: False)
    assert worker.measure(["rms_norm"], Settings(), tmp_path) == worker.GPU_LOST
    assert [s.spec for s in load(tmp_path / "results.json").shapes] == [broken.spec]


SCRIPT = """
    import json, pathlib, sys, time
    folder = pathlib.Path(sys.argv[-1])
    kept = json.loads(pathlib.Path(__file__).with_name("one_shape.json").read_text())
    (one,), shapes = kept["runs"][0]["shapes"], []
    for op in json.loads((folder / "request.json").read_text())["operations"]:
        (folder / "progress.txt").write_text(op)
        if op == "refused":
            (folder / "error.txt").write_text("no GPU here")
            sys.exit(2)
        if op == "dies":
            sys.exit(9)
        if op == "hangs":
            time.sleep(60)
        shapes.append({**one, "op": op})
        kept["runs"][0]["shapes"] = shapes
        (folder / "results.json").write_text(json.dumps(kept))
"""


@pytest.fixture
def run(tmp_path):
    """Runs the supervisor over a worker that does as its operations are called."""
    write(tmp_path / "one_shape.json", results(shape()))
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def measure(*operations, stall_seconds=60.0):
        output = tmp_path / "out.json"
        measured = supervisor.run(
            operations, Settings(), output, stall_seconds=stall_seconds, worker=(sys.executable, str(script))
        )
        assert load(output) == measured
        return measured

    return measure


def test_a_process_that_dies_costs_one_operation(run):
    got = run("a", "dies", "b")
    assert [s.op for s in got.shapes] == ["a", "b"]
    assert got.runs[-1].left_out == ("dies: the measuring process ended with exit code 9",)


def test_a_process_that_hangs_is_ended(run):
    got = run("a", "hangs", stall_seconds=8.0)
    assert [s.op for s in got.shapes] == ["a"]
    assert got.runs[-1].left_out == ("hangs: the measuring process was ended after 8 s without a result",)


def test_refusal_and_nothing_measured_are_errors(run):
    with pytest.raises(BenchError, match="no GPU here"):
        run("refused")
    with pytest.raises(BenchError, match=r"nothing was measured: dies: .* exit code 9"):
        run("dies")


def test_each_case_of_a_model_has_a_process(tmp_path, monkeypatch):
    """Wall clock is taken before CUPTI has been in use."""
    asked = []

    def run_worker(command, folder, *_):
        asked.append(json.loads((folder / "request.json").read_text())["operations"])
        write(folder / "results.json", results(shape(op=asked[-1][0])))

    monkeypatch.setattr(supervisor, "_run_worker", run_worker)
    cases = ["decode 1x8", "train 1x8"]
    got = supervisor.run(cases, Settings(), tmp_path / "out.json", benchmark="model")
    assert asked == [["decode 1x8"], ["train 1x8"]]
    assert [each.op for each in got.shapes] == cases
    assert load(tmp_path / "out.json") == got


def test_why_nothing_was_measured_is_told(tmp_path, monkeypatch):
    def run_worker(command, folder, *_):
        write(folder / "results.json", results(left_out=("tiny decode 1x8: too many positions",)))

    monkeypatch.setattr(supervisor, "_run_worker", run_worker)
    with pytest.raises(BenchError, match="nothing was measured: tiny decode 1x8: too many positions"):
        supervisor.run(["decode 1x8"], Settings(), tmp_path / "out.json", benchmark="model")


def test_memory_is_left_to_pytorch_where_it_runs():
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    for peer in ("liger", "fa4_deterministic", "quack"):
        assert supervisor.worker_environment(Settings(peers=(peer,)), {})[name] == "false"
    with_liger = Settings(peers=("fa3", "liger"))
    assert supervisor.worker_environment(with_liger, {name: "true"})[name] == "true"
    assert supervisor.worker_environment(Settings(peers=("fa3",)), {}) == {}
    assert supervisor.worker_environment(Settings(variants=True), {}) == {"MOSAIC_GPU_DUMP_PTXAS": "1"}


def test_real_operation_has_bench_specs():
    assert get_op("rms_norm").tagged("bench")
