"""Tuning without a GPU: which shapes are timed, what their times say, and what is kept of a run cut short."""

from __future__ import annotations

import dataclasses

import pytest
from test_bench_results import measured, results, shape
from typer.testing import CliRunner

from pallas_kernels import REGISTRY, get_op, tuning
from pallas_kernels.specs import plain
from xlafuse.bench import kernels, tune
from xlafuse.bench.kernels import bench_operation
from xlafuse.bench.results import write
from xlafuse.bench.settings import Settings
from xlafuse.bench.tune import NothingToTuneError
from xlafuse.cli import app

KIND = "NVIDIA H200"
SPEC = get_op("linear").tagged("bench")[0].name
KEY = tune.keys(get_op("linear"))[SPEC]


def timed(spec=SPEC, **times):
    """A shape of linear with such times; a name without a place in `times` was not timed."""
    kinds = {"xla": "implementation", "mosaic": "implementation", "triton": "implementation"}
    candidates = [
        measured(name if name in kinds else f"variant: {name}", kinds.get(name, "variant"), us)
        for name, us in times.items()
    ]
    return shape(spec, op="linear", candidates=tuple(candidates))


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        ({"xla": 100, "mosaic": 101, "256x128": 98}, ("mosaic", "256x128")),
        ({"xla": 100, "mosaic": 101, "256x128": 99.5}, ("xla", None)),  # runs differ by as much
        ({"xla": 100, "mosaic": 90.5, "256x128": 90}, ("mosaic", None)),
        ({"xla": 100, "mosaic": 92, "256x128": 90}, ("mosaic", "256x128")),
        ({"xla": 100, "mosaic": 92, "triton": 80, "256x128": 79.5}, ("triton", None)),
        ({"xla": 100, "256x128": 90}, ("mosaic", "256x128")),  # the untuned one did not run
    ],
)
def test_what_is_clearly_faster_is_taken(times, taken):
    found = tune.choice(timed(**times))
    assert (found.implementation, found.variant) == taken
    assert found.microseconds == times


def test_shapes_without_a_comparison_say_nothing():
    assert tune.choice(timed(xla=100)) is None
    assert tune.choice(timed(mosaic=100)) is None
    backward = dataclasses.replace(timed(xla=100, mosaic=90), phase="backward")
    assert tune.entries(results(backward, shape(), timed("of last year", xla=2, mosaic=1))) == {}


def test_of_shapes_with_one_key_the_first_is_timed():
    for name in tune.tunable():
        op, found = REGISTRY[name], tune.keys(REGISTRY[name])
        assert len(set(found.values())) == len(found)
        everything = {tuning.key_of(name, "forward", op.tuned_key(plain(s.structs()))) for s in op.tagged("bench")}
        assert set(found.values()) == everything


@pytest.fixture
def supervised(monkeypatch):
    """The specs that were asked for; every one is measured, until the process dies."""
    asked = []

    def run(operations, settings, output, *, kept):
        assert settings.phases == ("forward",)
        assert settings.variants
        asked.append(settings.only)
        shapes = []
        for name in settings.only[:2]:
            shapes.append(timed(name.partition(" ")[2], xla=100, mosaic=90))
            kept(results(*shapes))
        return results(*shapes)

    monkeypatch.setattr(tune.supervisor, "run", run)
    return asked


def test_a_run_cut_short_goes_on_where_it_ended(supervised, tmp_path):
    table, log = tmp_path / "h200.json", tmp_path / "log.json"

    def run(anew=False):
        tune.run(["linear"], Settings(match="8192"), table, log, device_kind=KIND, anew=anew)

    run()
    assert len(tuning.read(table, KIND)) == 2
    run()
    everything = tuple(f"linear {spec}" for spec in tune.keys(get_op("linear")) if "8192" in spec)
    assert supervised == [everything, everything[2:]]
    with pytest.raises(NothingToTuneError, match="already has every such shape"):
        run()
    run(anew=True)
    assert supervised[2] == everything
    found = tuning.read(table, KIND)
    assert set(found) == {tune.keys(get_op("linear"))[name.partition(" ")[2]] for name in everything}
    assert tune.lines({KEY: found[KEY]}) == [f"{KEY}: mosaic, 90.0 µs, 1.111 × XLA"]


def test_phases_are_tuned_where_they_are_looked_up(monkeypatch, tmp_path):
    asked = []

    def run(operations, settings, output, *, kept):
        asked.append((operations, settings.phases, output.name))
        shapes = [timed(spec.partition(" ")[2], xla=100, mosaic=90) for spec in settings.only]
        made = results(*(dataclasses.replace(s, op=operations[0], phase=settings.phases[0]) for s in shapes))
        kept(made)
        return made

    monkeypatch.setattr(tune.supervisor, "run", run)
    table = tmp_path / "h200.json"
    settings = Settings(match="4x4096x4096x32x8x128-bfloat16-causal")
    tune.run(["attention"], settings, table, tmp_path / "log.json", device_kind=KIND, anew=False)
    assert asked == [
        (("attention",), ("forward",), "log.json"),
        (("attention",), ("backward",), "backward-log.json"),
    ]
    assert {key.split()[1] for key in tuning.read(table, KIND)} == {"forward", "backward"}


def test_the_benchmark_measures_only_what_is_asked_for_and_untuned(monkeypatch):
    op, seen = get_op("linear"), []

    def bench_shape(op, spec, phase, settings, sampler):
        seen.append((spec.name, tuning.choice("linear", phase, op.tuned_key(plain(spec.structs())))))
        return shape()

    monkeypatch.setattr(kernels, "bench_shape", bench_shape)
    monkeypatch.setattr(tuning, "_entries", lambda *_: {KEY: "what the table says"})
    settings = Settings(phases=("forward",))
    list(bench_operation(op, dataclasses.replace(settings, match=SPEC)))
    list(bench_operation(op, dataclasses.replace(settings, only=(f"linear {SPEC}",))))
    assert seen == [(SPEC, "what the table says"), (SPEC, None)]


def test_a_table_may_be_made_of_kept_measurements(tmp_path):
    write(tmp_path / "kept.json", results(timed(xla=100, mosaic=101, **{"256x128": 90})))
    words = ["tune", "--results", str(tmp_path / "kept.json"), "-o", str(tmp_path / "h200.json")]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert f"{KEY}: mosaic, 256x128, 90.0 µs, 1.111 × XLA" in told.output
    assert tuning.read(tmp_path / "h200.json", KIND)[KEY].variant == "256x128"
    told = CliRunner().invoke(app, [*words, "--op", "softmax"])
    assert (told.exit_code, "unknown tuned operation 'softmax'" in told.output) == (2, True)
