"""Implements `xlafuse check`: limits on a program's launches, traffic and memory, for continuous integration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlafuse.cli.errors import InputError
from xlafuse.cli.programs import Program, analysis_of, load_analysis

if TYPE_CHECKING:
    from hlo_analysis.budget import Limits, Lock
    from hlo_analysis.records import Analysis

_UNITS = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}


def parse_bytes(text: str) -> int:
    """Parses a number of bytes with a decimal unit: '1.5GB' gives 1500000000.

    Raises:
        typer.BadParameter: the text is not a number of bytes.
    """
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmgt]?b?)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(f"expected 250000000, 250MB or 1.5GB, got {text!r}")
    return round(float(match[1]) * _UNITS[match[2]])


def _bytes(text: str) -> Any:
    return typer.Option(metavar="BYTES", parser=parse_bytes, help=text)


@dataclass(frozen=True, kw_only=True)
class Request(Program):
    """Options of `xlafuse check`."""

    max_launches: Annotated[int | None, typer.Option(metavar="N", min=0, help="Most launches in one run.")] = None
    max_hbm_bytes: Annotated[int | None, _bytes("Most HBM traffic in one run, such as 250000000 or 250MB.")] = None
    max_peak_bytes: Annotated[int | None, _bytes("Most memory in use at once, with arguments and results.")] = None
    max_value_bytes: Annotated[
        int | None, _bytes("Largest array between launches, such as 64MB: one launch writes it for others to read.")
    ] = None
    max_collective_bytes: Annotated[int | None, _bytes("Most bytes that one GPU sends to others in one run.")] = None
    no_all_gather: Annotated[
        bool, typer.Option("--no-all-gather", help="Allow no array to be gathered from several GPUs.")
    ] = False
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Allow no more launches, bytes or peak memory than in this file from --write, or a report.json "
            "(report.json:STRATEGY).",
        ),
    ] = None
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the numbers to this file, for --baseline.")
    ] = None


def check(request: Request) -> None:
    """Check that a program makes no more launches, moves no more bytes and takes no more memory than limits allow.

    Needs no GPU. Exits with 0 if the program keeps to the limits, 1 if it exceeds one, 2 on bad input.
    """
    from hlo_analysis.budget import Limits

    limits = Limits(**{field.name: getattr(request, field.name) for field in fields(Limits)})
    baseline = request.baseline
    if limits.is_none and baseline is None and request.write is None:
        raise InputError(
            "expected --max-launches, another --max option, --no-all-gather or --baseline to check, or --write"
        )
    before, full = _baseline(baseline) if baseline is not None else (None, None)
    analysis = analysis_of(request)
    exceeded = _checked(analysis, limits, before, full, baseline or "")
    if request.write is not None:
        _write(analysis, request.write)
    raise typer.Exit(1 if exceeded else 0)


def _checked(analysis: Analysis, limits: Limits, before: Lock | None, full: Analysis | None, baseline: str) -> bool:
    """Prints what is exceeded and by which launches; returns whether anything is."""
    from hlo_analysis.budget import Limits, differences_in_making, excesses, lock_of, other_program, responsible
    from hlo_analysis.report.budget import excess_text, responsible_lines
    from hlo_analysis.report.formats import format_bytes, plural

    found = [
        (replace(excess, origin=f"--{excess.origin.replace('_', '-')}"), None) for excess in excesses(analysis, limits)
    ]
    if before is not None:
        if apart := other_program(before, lock_of(analysis)):
            raise InputError(
                f"{baseline} is of another program: {'; '.join(apart)}. Name this program's baseline, or write it with "
                "--write"
            )
        for text in differences_in_making(before, lock_of(analysis)):
            print(f"note: {text}")
        known = Limits(max_launches=before.launches, max_hbm_bytes=before.hbm_bytes, max_peak_bytes=before.peak_bytes)
        found += [
            (excess, _changed_launches(full, analysis)) for excess in excesses(analysis, known, f"as in {baseline}")
        ]
    for excess, among in found:
        print(f"exceeded: {excess_text(excess)}")
        for line in responsible_lines(responsible(analysis, excess, among)):
            print(line)
    if not found:
        total = f"{plural(analysis.launch_count, 'launch')}, {format_bytes(analysis.traffic.bytes)} of HBM traffic"
        print(f"ok: {analysis.label} on {analysis.provenance.target}: {total}")
    return bool(found)


def _changed_launches(before: Analysis | None, after: Analysis) -> Sequence[int] | None:
    """Returns the launches of `after` that do other work than those of `before`; None without `before`."""
    if before is None:
        return None
    from hlo_analysis.changes import difference

    return [index for change in difference(before, after).changes for index in change.after]


def _baseline(text: str) -> tuple[Lock, Analysis | None]:
    from hlo_analysis.budget import lock_of, read_lock
    from hlo_analysis.saved import is_json, read_text

    if is_json(text) and Path(text).is_file() and (lock := read_lock(read_text(text))):
        return lock, None
    analysis = load_analysis(text)
    return lock_of(analysis), analysis


def _write(analysis: Analysis, path: Path) -> None:
    from hlo_analysis.budget import lock_of, lock_to_json
    from xlafuse.files import write_files

    if path.suffix != ".json":
        raise InputError(f"expected --write FILE.json, got {path.name!r}")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: no folder {path.parent}")
    write_files(path.parent, {path.name: lock_to_json(lock_of(analysis))})
    print(f"wrote {path}")
