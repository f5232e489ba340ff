"""Loads the committed H200 measurements of kernels and blocks; only a checkout has them, not a wheel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from xlafuse.bench.results import Results, ShapeResult
from xlafuse.bench.results import load as load_results
from xlafuse.measurements import RECORDINGS, Measurements, load
from xlafuse.studies.records import Row, StudyError

KERNELS = Path(__file__).parents[2] / "notebooks" / "results" / "kernels-h200.json"
NOTE = "recorded"


def kernels() -> Results:
    """Returns the results of the kernel benchmark.

    Raises:
        StudyError: this is not a checkout.
    """
    if not KERNELS.is_file():
        raise StudyError(f"expected the repository's results at {KERNELS}; run this study in a checkout")
    return load_results(KERNELS)


def shapes(op: str, phase: str) -> Iterator[ShapeResult]:
    """Yields the last measurement of each shape of an operation."""
    yield from {s.spec: s for s in kernels().shapes if (s.op, s.phase) == (op, phase)}.values()


def recorded_rows(op: str, phase: str, spec: str, case: str, names: Mapping[str, str]) -> Iterator[Row]:
    """Yields the recorded times of a shape's candidates as variants, with the given names."""
    for shape in shapes(op, phase):
        if shape.spec == spec:
            for candidate, variant in names.items():
                if (us := shape.microseconds(candidate)) == us:
                    yield Row(case=case, variant=variant, values={"us": us}, note=NOTE)


def blocks() -> Iterator[Measurements]:
    """Yields transformer blocks under several strategies, launch by launch."""
    for path in sorted(RECORDINGS.glob("nvidia-h200/*.json")):
        yield load(path)
