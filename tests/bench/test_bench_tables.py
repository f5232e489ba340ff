"""The tables of README and docs/results.md, and the script that merges and shows results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from test_bench_results import day, measured, results, shape

from xlafuse.bench.environment import Activity, Spread
from xlafuse.bench.results import Problem, ResultsError, load, merge, write
from xlafuse.bench.tables import details, overview, place

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/write_results.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("write_results", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_has_rates_ratios_and_small_calls_apart():
    small = shape(
        "1x4096-float32",
        bytes=1000,
        candidates=(measured("copy", "ceiling", 1.0), measured("xla", "implementation", 2.0),
                    measured("mosaic", "implementation", 1.5)),
    )  # fmt: skip
    only_xla = shape("7x7", candidates=(measured("copy", "ceiling", 245.0), measured("xla", "implementation", 490.0)))
    kept = results(shape(), only_xla, small)
    text = details(kept)
    assert text.startswith("NVIDIA H200, 2026-01-01. Median GPU time")
    assert "1. 2026-01-01 00:00 UTC; peers: none; jax 0.11.2" in text
    assert "| operation |  | shape | µs | GB/s | of the ceiling | × XLA | × Liger | run |" in text
    assert "| `rms_norm` | forward | 32768x4096-bf16 | 250.0 | 4000 | 98 % | 2.00 | 1.20 | 1 |" in text
    assert "| `rms_norm` | forward | 7x7 | 490.0 | 2041 | 50 % | – | – | 1 |" in text
    assert "| `rms_norm` | forward | 1x4096-f32 | 1.50 | 2.00 | -0.50 | 1 |" in text
    text = overview(kept)
    assert "| bound by memory |  | of the ceiling | × XLA | × Liger | shapes |" in text
    assert "| `rms_norm` | forward | 70 % | 2.00 | 1.20 | 2 |" in text
    assert "| geometric mean |  | 70 % | 2.00 | 1.20 | 2 |" in text


def test_matrix_products_have_their_own_tables():
    """8192x4096x4096 is 275 GFLOP: 800 TF/s in 343.6 µs. With 16 rows the weights' bytes set the time."""
    busy = Activity(samples=7, quantities={"sm_clock_mhz": Spread(least=1620.0, median=1740.0, most=1980.0),
                                           "power_watts": Spread(least=127.0, median=314.0, most=572.0)})  # fmt: skip
    many = shape("8192-4096-4096-bfloat16", op="linear", bytes=168 * 2**20, us=343.6, activity=busy)
    few = shape("16-4096-16384-bfloat16-bias-gelu_tanh", op="linear", bytes=135 * 2**20)
    kept = results(many, few, shape())
    text = details(kept)
    assert "| operation |  | shape | µs | TF/s | × XLA | × Liger | MHz | W | run |" in text
    assert (
        "| `linear` | forward | 8192-4096-4096-bf16 | 343.6 | 800 | 1.46 | 0.87 | 1740 (1620) | 314 (572) | 1 |" in text
    )
    assert "| `linear` | forward | 16-4096-16384-bf16-bias-gelu_tanh | 250.0 |" in text
    text = overview(kept)
    assert "| matrix products |  | TF/s | × XLA | × Liger | shapes |" in text
    assert "| `linear` | forward | 800 | 1.46 | 0.87 | 1 |" in text
    assert text.count("`linear`") == 2


def test_a_reduced_loss_and_its_gradients_are_a_row_of_the_tables():
    """`linear_cross_entropy` backward: 3 products of 4096x4096x128256, 12.9 TFLOP, 808 TF/s in 16 ms."""
    spec = "4096-4096-128256-bfloat16-reduction_mean"
    candidates = (measured("copy", "ceiling", 500.0), measured("xla", "implementation", 18e3),
                  measured("mosaic", "implementation", 16e3), measured("liger", "peer", 40e3))  # fmt: skip
    forward = (*candidates[:2], measured("mosaic", "implementation", 5.5e3))
    kept = results(shape(spec, op="linear_cross_entropy", candidates=forward),
                   shape(spec, op="linear_cross_entropy", phase="backward", candidates=candidates))  # fmt: skip
    row = "| `linear_cross_entropy` | backward | 4096-4096-128256-bf16-reduction_mean | 16000.0 | 807 | 1.12 | 2.50 |"
    assert row in details(kept)
    assert "| `linear_cross_entropy` | backward | 807 | 1.12 | 2.50 | 1 |" in overview(kept)


def test_columns_of_other_runs_are_ratios_within_those_runs():
    """Ours took 250 µs beside nothing, 260 beside Liger, 400 beside jax-triton."""
    alone = shape(candidates=(measured("copy", "ceiling", 245.0), measured("xla", "implementation", 500.0),
                              measured("mosaic", "implementation", 250.0)))  # fmt: skip
    triton = (measured("mosaic", "implementation", 400.0), measured("triton", "implementation", 800.0))
    parts = [results(shape(candidates=(*alone.candidates[:2], *triton)), started=day(2)), results(shape(us=260.0)),
             results(alone, started=day(4))]  # fmt: skip
    merged = merge(parts)
    text = details(merged)
    assert "| operation |  | shape | µs | GB/s | of the ceiling | × XLA | × Liger | × jax-triton | run |" in text
    cells = "250.0 | 4000 | 98 % | 2.00 | 1.15 | 2.00 | 3, Liger 2, jax-triton 1"
    assert f"| `rms_norm` | forward | 32768x4096-bf16 | {cells} |" in text
    assert "| `rms_norm` | forward | 98 % | 2.00 | 1.15 | 2.00 | 1 |" in overview(merged)


def test_place_keeps_the_rest_and_is_stable():
    begin, end = "<!-- here:begin -->", "<!-- here:end -->"
    text = f"a\n{begin}\nold\n{end}\nb\n"
    placed = place(text, "new", "here")
    assert placed == f"a\n{begin}\nnew\n{end}\nb\n"
    assert place(placed, "new", "here") == placed
    for broken in ("a", f"{end}{begin}", f"{begin}{end}{end}"):
        with pytest.raises(ResultsError, match="expected one"):
            place(broken, "new", "here")


def test_pages_are_written(script, tmp_path, monkeypatch, capsys):
    for name in ("README", "KEPT", "TESTS", "SANITIZER"):
        monkeypatch.setattr(script, name, tmp_path / getattr(script, name).name)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "DOCS", tmp_path)
    monkeypatch.setattr(script, "PAGES", tuple(tmp_path / path.name for path in script.PAGES))
    marked = {"README": ("summary",), "results": ("results", "block", "h100", "models")}
    marked["correctness"] = ("checks",)
    for page, names in marked.items():
        markers = [f"<!-- {name}:{end} -->" for name in names for end in ("begin", "end")]
        (tmp_path / f"{page}.md").write_text("\n".join(markers))
    assert script.main([]) == 2
    assert "expected a file of benchmark results" in capsys.readouterr().err
    write(script.KEPT, results(shape()))
    write(tmp_path / "kernels-h100.json", results(shape()))
    write(tmp_path / "model-h100.json", results(shape("a model, 2 layers")))
    assert script.main([]) == 0
    text = {page: (tmp_path / f"{page}.md").read_text() for page in marked}
    assert "98 %" in text["README"]
    assert "4000" in text["results"]
    assert "<!-- block:begin -->\nNot measured yet." in text["results"]
    assert "| a model, 2 layers |" in text["results"]
    assert "Not run yet." in text["correctness"]


def test_show_of_drawn_calls(script, capsys):
    kept = SCRIPT.parents[1] / "notebooks/results/choice-h200.json"
    assert script.main(["--show", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert "best / None 0.514 !!" in shown
    assert "246 of 246 calls measured, 11 more than 3 % and 0.5 µs behind the fastest" in shown


def test_merge_and_show(script, tmp_path, capsys):
    broken = [Problem(candidate="liger", message="no such thing")]
    write(tmp_path / "a.json", results(shape(us=260.0), shape("b", problems=tuple(broken)), started=day(2)))
    write(tmp_path / "b.json", results(shape(us=250.0), shape("c", problems=tuple(broken)), started=day(3)))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert script.main(["--merge", *files, "-o", str(tmp_path / "c.json")]) == 0
    assert "3 shapes of 2 runs" in capsys.readouterr().out
    merged = load(tmp_path / "c.json")
    assert sorted(s.microseconds("mosaic") for s in merged.shapes) == [250.0, 250.0, 250.0]
    assert script.main(["--show", str(tmp_path / "c.json")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("failed: liger: no such thing") == 2
    assert "variant: a                240.00 µs" in shown


REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="4" time="12.34">
<testcase classname="tests.gpu" name="test_a[x]" time="1"/>
<testcase classname="tests.gpu" name="test_a[y]" time="1"><failure message="AssertionError: off&#10;by 2">x</failure>
</testcase>
<testcase classname="tests.gpu" name="test_b" time="1"><error message="failed on setup">x</error></testcase>
<testcase classname="tests.gpu" name="test_c" time="1"><skipped message="no GPU">x</skipped></testcase>
</testsuite></testsuites>
"""


def test_pytest_report_is_counted_and_told(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "gpu_state", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setenv("XLAFUSE_COMMIT", "abc1234")
    (tmp_path / "tests.xml").write_text(REPORT)
    kept = tmp_path / "kept.json"
    assert script.main(["--tests", str(tmp_path / "tests.xml"), "-o", str(kept)]) == 0
    text = script.checks(kept, tmp_path / "nothing.json")
    assert text.startswith("`tests/gpu` on one NVIDIA H200, 20")
    assert "commit abc1234: 1 passed, 2 failed, 1 skipped (" in text
    assert text.endswith("Failed: test_a[y]: AssertionError: off. Failed: test_b: failed on setup.")
    assert script.main(["--tests", str(tmp_path / "nothing.xml")]) == 2
    assert "expected pytest's XML report" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcomes", "told"),
    [
        ({"planted fault": "faults", "rope": "clean", "softmax": "clean"}, "2 operations clean."),
        (
            {"planted fault": "faults", "softmax": "faults", "rope": "failed"},
            "reports faults of `softmax` as far as the tool came (it died in other calls of `rope`).",
        ),
        ({"rope": "clean", "planted fault": "clean"}, "1 operations clean, but it did not see the planted fault."),
    ],
)
def test_sanitizer_is_told_without_the_planted_fault(script, tmp_path, outcomes, told):
    rows = [{"operation": name, "status": status, "cases": ["forward a"]} for name, status in outcomes.items()]
    document = {"device": "", "date": "2026-01-01T00:00Z", "commit": "", "outcomes": rows}
    (tmp_path / "sanitizer.json").write_text(json.dumps(document))
    text = script.checks(tmp_path / "nothing.json", tmp_path / "sanitizer.json")
    assert text.startswith("`compute-sanitizer` on one unnamed GPU, 2026-01-01: memcheck over")
    assert text.endswith(told)
