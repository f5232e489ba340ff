"""Measured times on a comparison: from a file, a profile, or the recordings of the block presets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jax.profiler import ProfileData

from hlo_analysis.measured import join, read_profile
from hlo_analysis.records import Comparison, Measured
from tests.measured.profiles import profile, xspace
from tests.report.examples import llama_comparison, with_times
from xlafuse import compare, measurements
from xlafuse.bench.results import load as load_results
from xlafuse.measurements import MeasurementsError, load, with_measurements, with_profile, with_recordings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return llama_comparison()


def times(comparison: Comparison) -> dict[str, float | None]:
    return {each.name: each.measured_us for each in comparison.strategies if each.measured_us is not None}


def test_a_file_gives_back_what_was_measured(comparison: Comparison, tmp_path: Path):
    timed = with_times(comparison)
    file = tmp_path / "measured.json"
    file.write_text(measurements.to_json(measurements.measurements_of(timed)))
    assert with_measurements(comparison, load(file)) == timed
    file.write_text(file.read_text()[:500])
    with pytest.raises(MeasurementsError, match="expected measured times"):
        load(file)
    file.write_text('{"schema_version": 7}')
    with pytest.raises(MeasurementsError, match="schema version 7, expected 1"):
        load(file)
    with pytest.raises(MeasurementsError, match="No such file"):
        load(tmp_path / "none.json")


def test_a_file_of_another_program_is_refused(comparison: Comparison):
    measured = measurements.measurements_of(with_times(comparison))
    pallas = measured.strategies["pallas"]
    with pytest.raises(MeasurementsError, match=r"xla: measured of another program than xla: launch \d+ is"):
        with_measurements(comparison, replace(measured, strategies={"xla": pallas}))
    with pytest.raises(MeasurementsError, match="measured were the strategies mine"):
        with_measurements(comparison, replace(measured, strategies={"mine": pallas}))


def test_a_profile_is_of_the_strategies_that_it_shows(comparison: Comparison, tmp_path: Path):
    def write(names: list[str]) -> None:
        events = profile(names, [7.0]).events
        (tmp_path / "x.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(xspace(events)))

    analysis = comparison["xla_cudnn"].analysis
    assert analysis is not None
    write([f"{launch.kernel or 'nvjet'}@{launch.name}" for launch in analysis.launches] * 2)
    found = times(with_profile(comparison, read_profile(tmp_path)))
    assert found == {"xla_cudnn": pytest.approx(7.0 * len(analysis.launches), rel=0.01)}
    write(["other"] * 99)
    with pytest.raises(MeasurementsError, match=r"beside xla: the profile is of another program.*has launch 0"):
        with_profile(comparison, read_profile(tmp_path))


def test_times_of_another_gpu_or_version_are_totals_of_something_else(comparison: Comparison):
    mine = measurements.measurements_of(with_times(comparison))
    xla = mine.strategies["xla"]

    def found(measured: Measured, versions: tuple[tuple[str, str], ...] = ()) -> Measured:
        analysis = comparison["xla"].analysis
        assert analysis is not None
        analysis = replace(analysis, provenance=replace(analysis.provenance, versions=versions))
        alone = replace(comparison, strategies=(replace(comparison["xla"], analysis=analysis),))
        made = with_measurements(alone, replace(mine, strategies={"xla": measured}))["xla"]
        assert made.analysis is not None
        assert made.analysis.measured is not None
        timed = any(launch.measured_us for launch in made.analysis.launches)
        assert (made.measured_us is not None) == timed == (not made.analysis.measured.differs)
        return made.analysis.measured

    ran = replace(xla, environment=(("jaxlib", "0.11.2"), ("driver", "580")))
    assert found(ran, (("jaxlib", "0.11.2"), ("driver", "570"))) == ran
    other = found(ran, (("jaxlib", "0.12.0"),))
    assert other.differs == "another version"
    assert other.kernel_us == xla.kernel_us
    assert other.notes == ("Measured with jaxlib 0.11.2; this program is compiled with 0.12.0.",)
    other = found(replace(xla, device="NVIDIA H100 80GB HBM3"))
    assert other.differs == "another GPU"
    assert "Measured on an NVIDIA H100 80GB HBM3" in other.notes[0]


def test_a_recording_of_a_case_has_its_launches(comparison: Comparison, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(measurements, "RECORDINGS", tmp_path)
    file = tmp_path / "nvidia-h200" / "tiny-1x8-grad.json"
    file.parent.mkdir()
    measured = measurements.measurements_of(with_times(comparison))
    file.write_text(measurements.to_json(measured))
    assert with_recordings(comparison, "tiny", "1x8", "grad", "NVIDIA H200") == with_times(comparison)
    assert with_recordings(comparison, "tiny", "1x8", "grad", "NVIDIA H100") == comparison
    # The program has changed since: the total stays, and a note says so.
    stale = replace(measured, strategies={"xla": measured.strategies["pallas"]})
    file.write_text(measurements.to_json(stale))
    xla = with_recordings(comparison, "tiny", "1x8", "grad", "NVIDIA H200")["xla"].analysis
    assert xla is not None
    assert xla.measured is not None
    assert not xla.measured.launches
    assert xla.measured.differs == "older program"
    assert "Recorded before the program of xla changed: measured of another program" in xla.measured.notes[-1]


@pytest.mark.slow
@pytest.mark.drawn(1 / 2)
@pytest.mark.parametrize(("shape", "strategy"), [((1, 512), "xla_cudnn"), ((1, 512), "best")])
def test_the_launches_are_the_kernels_that_an_h200_ran(shape: tuple[int, int], strategy: str):
    pytest.importorskip("jax_plugins.xla_cuda13")
    analysis = compare("llama3-8b", shape, strategies=[strategy], baseline=strategy, numerics=False)[strategy].analysis
    assert analysis is not None
    assert analysis.measured is not None
    assert analysis.measured.differs == ""
    shapes = load_results(ROOT / "notebooks/results/block-h200.json").shapes
    cases = [each for each in shapes if each.key == ("llama3-8b", "1x512", "forward")]
    *_, ran = (each.timing.kernels for case in cases for each in case.candidates if each.name == strategy)
    measured = join(analysis, profile(ran * 3))
    assert measured.calls == 3
    assert all(time.median_us for time in measured.launches)
