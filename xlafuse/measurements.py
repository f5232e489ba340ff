"""Adds measured times to a comparison, from a file, a profile, or the recordings of the block presets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from hlo_analysis.measured import Profile, ProfileMismatchError, join, with_measured
from hlo_analysis.records import Analysis, Comparison, Measured
from xlafuse.errors import XlafuseError
from xlafuse.files import read_record
from xlafuse.files import to_json as to_json

SCHEMA_VERSION = 1
RECORDINGS = Path(__file__).with_name("recordings")
"""Folder with a file of `Measurements` for each case, <GPU>/<preset>-<shape>-<mode>.json.

`scripts/record_measured.py` writes them.
"""


class MeasurementsError(XlafuseError, ValueError):
    """A file of measured times cannot be read, or belongs to another program; the message says what differs."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Measured times of one program, by strategy."""

    schema_version: int = SCHEMA_VERSION
    title: str
    strategies: Mapping[str, Measured]


_ADAPTER = TypeAdapter(Measurements)


def measurements_of(comparison: Comparison) -> Measurements:
    """Returns the measured times that the comparison holds."""
    found = {each.name: each.analysis.measured for each in comparison.strategies if each.analysis is not None}
    measured = {name: each for name, each in found.items() if each is not None}
    return Measurements(title=comparison.title, strategies=measured)


def load(path: Path) -> Measurements:
    """Loads the text of `to_json`; raises MeasurementsError if it is none, or has another schema version."""
    what = "measured times, as `xlafuse report --measure` writes beside report.html,"
    return read_record(path, _ADAPTER, SCHEMA_VERSION, what, MeasurementsError)


def with_measurements(comparison: Comparison, measurements: Measurements) -> Comparison:
    """Returns the comparison with the times of the strategies that both have.

    Raises:
        MeasurementsError: no strategy in common, or one was measured on another program; the message names the first
            launch that differs.
    """
    if not any(name in measurements.strategies for name, _ in _analysed(comparison)):
        raise MeasurementsError(
            f"measured were the strategies {', '.join(measurements.strategies) or 'none'} of {measurements.title!r}; "
            f"this comparison has {', '.join(name for name, _ in _analysed(comparison))}"
        )
    made: dict[str, Analysis] = {}
    for name, analysis in _analysed(comparison):
        if measured := measurements.strategies.get(name):
            try:
                made[name] = with_measured(analysis, measured)
            except ProfileMismatchError as error:
                raise MeasurementsError(f"{name}: {error}") from None
    return _replaced(comparison, made)


def with_profile(comparison: Comparison, profiles: Sequence[Profile]) -> Comparison:
    """Returns the comparison with the times of a `jax.profiler` profile, for each strategy whose program it shows.

    profiles: of each GPU, as `read_profile` returns them.

    Raises:
        MeasurementsError: the profile shows none of them; the message names the first launch where the baseline
            differs.
    """
    made: dict[str, Analysis] = {}
    reasons: dict[str, str] = {}
    for name, analysis in _analysed(comparison):
        try:
            made[name] = with_measured(analysis, join(analysis, *profiles))
        except ProfileMismatchError as error:
            reasons[name] = str(error)
    if not made:
        raise MeasurementsError(f"the profile, beside {comparison.baseline}: {reasons[comparison.baseline]}")
    return _replaced(comparison, made)


def with_recordings(comparison: Comparison, preset: str, shape: str, mode: str, device_kind: str) -> Comparison:
    """Returns the comparison of a block preset with the times recorded on such a GPU, if there are any.

    If the program has changed since, only the total time stays, as that of an older program.
    """
    file = RECORDINGS / file_name(preset, shape, mode, device_kind)
    recorded = load(file).strategies if file.is_file() else {}
    made: dict[str, Analysis] = {}
    for name, analysis in _analysed(comparison):
        if (measured := recorded.get(name)) is not None and analysis.measured is None:
            try:
                made[name] = with_measured(analysis, measured)
            except ProfileMismatchError as error:
                made[name] = with_measured(analysis, _of_an_older_program(name, measured, error))
    return _replaced(comparison, made)


def file_name(preset: str, shape: str, mode: str, device_kind: str) -> str:
    """Returns the path of a case's recording in the folder of recordings."""
    return f"{device_kind.lower().replace(' ', '-')}/{preset}-{shape}-{mode}.json"


def _of_an_older_program(name: str, measured: Measured, error: ProfileMismatchError) -> Measured:
    notes = (*measured.notes, f"Recorded before the program of {name} changed: {error}.")
    return replace(measured, launches=(), notes=notes, differs="older program")


def _analysed(comparison: Comparison) -> list[tuple[str, Analysis]]:
    return [(each.name, each.analysis) for each in comparison.strategies if each.analysis is not None]


def _replaced(comparison: Comparison, analyses: Mapping[str, Analysis]) -> Comparison:
    strategies = (replace(each, analysis=analyses.get(each.name, each.analysis)) for each in comparison.strategies)
    return replace(comparison, strategies=tuple(strategies))
