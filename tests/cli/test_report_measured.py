"""`xlafuse report` with measured times, without a GPU: the measuring itself is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hlo_analysis.capture import plugin_log
from tests.report.examples import llama_comparison, with_times
from xlafuse import comparison, measurements


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def measured_file(tmp_path: Path) -> Path:
    file = tmp_path / "measured.json"
    file.write_text(measurements.to_json(measurements.measurements_of(with_times(llama_comparison()))))
    return file


def test_times_of_a_file_are_in_the_report_and_in_its_trace(invoke, compared, measured_file: Path):
    result = invoke("report", "--measured", measured_file, "-o", "timed")
    assert result.exit_code == 0, result.output
    assert "measured" in result.stdout
    words = ("--format", "perfetto", "--times", "measured", "-o", "trace.json")
    assert invoke("export", "timed/report.json", *words).exit_code == 0
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"cublas", "mosaic"}
    assert "measure" not in compared[0]


def test_without_a_gpu_measuring_names_the_other_ways(invoke, compared, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugin_log, "has_nvidia_gpu", lambda: False)
    result = invoke("report", "--measure")
    assert result.exit_code == 2
    assert "no GPU is attached: use --measured FILE or --profile DIR" in result.stderr
    assert not compared


def test_measuring_writes_what_it_measured(invoke, compared, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugin_log, "has_nvidia_gpu", lambda: True)
    # On this machine the comparison comes without times: that is a failure of each strategy.
    result = invoke("report", "--measure")
    assert result.exit_code == 1
    assert "xla has no measured time:" in result.stderr
    assert compared[0]["target"] == "attached"
    assert compared[0]["measure"] is True

    compare = comparison.compare
    monkeypatch.setattr(comparison, "compare", lambda *args, **kwargs: with_times(compare(*args, **kwargs)))
    result = invoke("report", "--measure", "--strategies", "xla", "-o", "timed")
    assert result.exit_code == 0, result.output
    assert set(measurements.load(Path("timed/measured.json")).strategies) >= {"xla", "pallas"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--measured", "none.json"), "No such file"),
        (("--profile", "none"), "holds no *.xplane.pb"),
        (("--measure", "--profile", "p"), "expected one of --measure, --measured and --profile"),
        (("--measure", "--target", "a100"), "cannot run for --target a100"),
    ],
)
def test_bad_input_is_told(invoke, compared, words: tuple[str, ...], message: str):
    result = invoke("report", *words)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
    assert not compared
