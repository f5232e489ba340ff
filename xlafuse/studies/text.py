"""Formats a study's rows as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from xlafuse.studies.records import Study, StudyResult

_UNITS = {"bytes": ("MB", 1e-6), "temp_bytes": ("MB temporary", 1e-6), "us": ("µs", 1.0), "launches": ("launches", 1.0)}


def list_lines(studies: Iterable[Study]) -> list[str]:
    """Formats a line for each study and one for each of its claims."""
    found = []
    for study in studies:
        found.append(f"{study.name}: {study.title}")
        found += [f"    {claim.text}: {claim.published} ({claim.source})" for claim in study.claims]
    return found


def lines(study: Study, result: StudyResult) -> list[str]:
    """Formats the rows by case."""
    found = [f"== {study.title} ({', '.join(f'{part.basis} for {part.target}' for part in result.parts)})"]
    for case in result.cases:
        found.append(case)
        for row in (row for row in result.rows if row.case == case):
            known = [f"{row.values[q] * s:,.4g} {unit}" for q, (unit, s) in _UNITS.items() if q in row.values]
            others = [f"{q} {v:.4g}" for q, v in row.values.items() if q not in _HIDDEN]
            found.append(f"  {row.variant}: {', '.join((*known, *others))}{f' ({row.note})' if row.note else ''}")
    found += [f"left out: {note}" for part in result.parts for note in part.left_out]
    return found


_HIDDEN = (*_UNITS, "p20_us", "p80_us", "wall_us", "flops", "roofline_us", "compile_seconds", "kernels")
