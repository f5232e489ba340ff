"""Files of results, their lines, and the process that measures."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import time
import warnings

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
from xlafuse.bench.settings import PublicSettings, Settings
from xlafuse.bench.text import result_lines, summary
from xlafuse.bench.timing import Timing
from xlafuse.bench.worker import BenchError

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


def test_a_result_has_a_line_for_each_candidate_with_time_ratio_rate_and_share():
    title, *lines, problem = result_lines(shape(problems=(Problem(candidate="torch_compile", message="a\nb"),)))
    assert title == " forward rms_norm 32768x4096-bf16"
    assert [line.split()[0] for line in lines] == ["xla", "mosaic", "liger", "variant:"]
    assert " ".join(lines[1].split()) == (
        "mosaic 250.00 µs ×2.000 4000 GB/s 98 % of the ceiling 1 launches, wall 250.0 µs"
    )
    assert problem == "      failed: torch_compile: a b"
    assert result_lines(shape(candidates=())) == [" forward rms_norm 32768x4096-bf16; not measured"]


def test_matrix_products_have_teraflops():
    product = shape(spec="8192-4096-4096-bfloat16", us=500.0, op="linear", bytes=10**8)
    assert "  550 TF/s" in result_lines(product)[2]  # 2 * 8192 * 4096 * 4096 operations
    assert "GB/s" in result_lines(shape(us=500.0))[2]


def test_a_model_is_compared_by_its_wall_clock():
    slow, fast = (dataclasses.replace(measured(name, "strategy", 100.0), tokens_per_second=us) for name, us in
                  (("xla", 1e4), ("best", 2e4)))  # fmt: skip
    fast = dataclasses.replace(fast, timing=dataclasses.replace(fast.timing, wall_us=50.0), compile_seconds=1.5)
    _, _, line = result_lines(shape(op="tiny, 2 layers", candidates=(slow, fast), ceiling=None))
    assert "×2.000  20000 tokens/s" in line
    assert "lower 0.0 + compile 1.5 s" in line


def test_summary_has_the_table_of_means_and_what_was_left_out():
    kept = results(shape(us=250.0), shape("b", us=125.0), left_out=("softmax: died",))
    table, last = summary(kept)
    assert "| `rms_norm` | forward | 139 % | 2.83 | 1.70 | 2 |" in table
    assert last == "left out: softmax: died"
    assert math.isnan(geometric_mean([]))


def test_the_process_sends_what_it_measures(monkeypatch, capsys):
    sent = []
    monkeypatch.setitem(worker.BENCHMARKS, "kernels", lambda op, *_: iter([shape(op=op), "b: late"]))
    worker.measure(sent.append, "kernels", ["rms_norm"], Settings())
    assert sent[0].device_kind == "cpu"
    assert sent[1:] == [("begun", "rms_norm"), shape(), "b: late"]
    assert capsys.readouterr().out.startswith("rms_norm\n forward rms_norm 32768x4096-bf16")


def test_the_process_ends_when_the_gpu_no_longer_answers(monkeypatch):
    sent = []
    broken = shape(problems=(Problem(candidate="mosaic", message="illegal address"),))
    monkeypatch.setitem(worker.BENCHMARKS, "kernels", lambda *_: iter([broken, shape("never")]))
    monkeypatch.setattr(worker, "gpu_answers", lambda: False)
    with pytest.raises(SystemExit):
        worker.measure(sent.append, "kernels", ["rms_norm"], Settings())
    assert sent[2:] == [broken]


def does_as_called(sender, benchmark, items, settings):
    """Measures operations that are named after what becomes of their process."""
    sender.send(H200)
    for item in items:
        sender.send(("begun", item))
        match item:
            case "refused":
                sender.send(BenchError("no GPU here"))
            case "dies":
                os._exit(9)
            case "hangs":
                time.sleep(60)
            case "left out":
                sender.send("tiny decode 1x8: too many positions")
            case _:
                sender.send(shape(op=item, seconds=float(len(items))))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the supervisor over a process that does as its operations are called; it is forked, to start at once."""
    monkeypatch.setattr(supervisor, "get_context", lambda _: multiprocessing.get_context("fork"))

    def measure(*items, **more):
        output = tmp_path / "out.json"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks beside JAX's threads
            settings = more.pop("settings", Settings())
            measured = supervisor.run(items, settings, output, measure=does_as_called, **more)
        assert load(output).shapes == measured.shapes
        return measured

    return measure


def test_a_process_that_dies_costs_one_operation(run):
    got = run("a", "dies", "b")
    assert [s.op for s in got.shapes] == ["a", "b"]
    assert got.runs[0].left_out == ("dies: the measuring process ended with exit code 9",)
    assert got.runs[0].settings["seconds"] is None


def test_a_process_that_hangs_is_ended(run):
    got = run("a", "hangs", stall_seconds=4.0)
    assert [s.op for s in got.shapes] == ["a"]
    assert got.runs[-1].left_out == ("hangs: the measuring process was ended after 4 s without a result",)


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ("refused", "no GPU here"),
        ("dies", r"nothing was measured: dies: .* exit code 9"),
        ("left out", "nothing was measured: tiny decode 1x8: too many positions"),
    ],
)
def test_refusal_and_nothing_measured_are_errors(run, item, told):
    with pytest.raises(BenchError, match=told):
        run(item)


def test_each_case_of_a_model_has_a_process(run):
    """Wall clock is taken before CUPTI has been in use."""
    assert [each.seconds for each in run("decode 1x8", "train 1x8", benchmark="model").shapes] == [1, 1]
    assert [each.seconds for each in run("a", "b").shapes] == [2, 2]


def test_public_models_compile_at_the_same_time_and_one_that_dies_costs_itself(run, tmp_path):
    settings = PublicSettings(checkouts=tmp_path, jobs=2)
    got = run("a", "dies", "left out", "b", "c", benchmark="public", settings=settings)
    assert [(each.op, each.seconds) for each in got.shapes] == [("a", 1), ("b", 1), ("c", 1)]
    notes = [note for each in got.runs for note in each.left_out]
    assert notes == [
        "dies: the measuring process ended with exit code 9",
        "tiny decode 1x8: too many positions",
    ]
    assert "checkouts" not in got.runs[0].settings
    assert worker.worker_environment(settings, {})["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert worker.worker_environment(dataclasses.replace(settings, jobs=1), {}) == {}


def test_memory_is_left_to_pytorch_where_it_runs():
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    for peer in ("liger", "fa4_deterministic", "quack"):
        assert worker.worker_environment(Settings(peers=(peer,)), {})[name] == "false"
    with_liger = Settings(peers=("fa3", "liger"))
    assert worker.worker_environment(with_liger, {name: "true"})[name] == "true"
    assert worker.worker_environment(Settings(peers=("fa3",)), {}) == {}


def test_real_operation_has_bench_specs():
    assert get_op("rms_norm").tagged("bench")
