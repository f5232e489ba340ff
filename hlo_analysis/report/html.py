"""Renders a comparison as one HTML file, which needs no network and escapes every text of the program."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from hlo_analysis.records import Analysis, Comparison, Launch, Provenance, ScopeRow, StrategyResult
from hlo_analysis.report import formats, launch_families, sentences
from hlo_analysis.report.formats import Units, units_of
from hlo_analysis.report.payload import embedded_json, payload, totals
from hlo_analysis.report.similar_layers import fold_layers, without_numbers
from hlo_analysis.report.times import measured_sentences

STYLES = ("page.css", "tables.css", "sections.css")
SCRIPTS = (
    "data.js",
    "card.js",
    "strategies.js",
    "launches.js",
    "missed.js",
    "decisions.js",
    "columns.js",
    "graph.js",
    "main.js",
)


def render_html(comparison: Comparison) -> str:
    """The whole page as text.

    Raises:
        KeyError: the comparison's baseline is none of its strategies.
    """
    base = comparison[comparison.baseline]
    script = Markup(_static(SCRIPTS))
    units = units_of(comparison)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            comparison=comparison,
            base=base,
            is_alone=sum(result.analysis is not None for result in comparison.strategies) < 2,
            units=units,
            verdict=sentences.verdict_sentences(comparison),
            strategies=[_strategy(comparison, result, base.analysis, units) for result in comparison.strategies],
            tiles=_tiles(comparison, base.analysis) if base.analysis else [],
            bars=_traffic_bars(comparison),
            rows=_scope_rows(comparison),
            provenance=_provenance(comparison),
            caveats=[note for names, note in sentences.caveats(comparison) if not names or base.name in names],
            measured_notes=[note for _, note in measured_sentences(comparison)],
            families=_families_present(comparison),
            has_measured=any(result.measured_us is not None for result in comparison.strategies),
            has_wall=any(result.wall_us is not None for result in comparison.strategies),
            has_numerics=any(result.numerics is not None for result in comparison.strategies),
            data=Markup(embedded_json(payload(comparison))),
            style=Markup(_static(STYLES)),
            script=script,
            script_hash=_sha256(script),
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hlo_analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        bytes=formats.format_bytes,
        us=formats.format_us,
        family=launch_families.family_of,
        breakable=_breakable,
    )
    environment.globals.update(change=formats.format_change, family_descriptions=launch_families.FAMILIES)
    return environment


def _breakable(name: str) -> Markup:
    """The name, escaped, with places where a line may break after each underscore."""
    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


@cache
def _static(names: tuple[str, ...]) -> str:
    folder = files("hlo_analysis.report") / "static"
    return "\n" + "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _sha256(text: str) -> str:
    """The script's hash for the content security policy: nothing else on the page may run."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _strategy(comparison: Comparison, result: StrategyResult, base: Analysis | None, units: Units) -> dict[str, Any]:
    analysis = result.analysis
    made: dict[str, Any] = {
        "result": result,
        "analysis": analysis,
        "numerics": sentences.numerics_text(result.numerics),
    }
    if analysis is None:
        return made
    return made | {
        "totals": totals(result, analysis),
        "saved_bytes": comparison.saved_bytes(result.name),
        "saved_percent": sentences.saved_percent(comparison, result.name),
        "roofline": sentences.roofline_text(analysis, base, units.time),
        "is_lower_bound": sentences.is_lower_bound(analysis, base),
        "gemm": sentences.gemm_choice(analysis.provenance),
        "kinds": sorted(analysis.launches_by_kind.items(), key=lambda item: _family_place(item[0])),
    }


def _family_place(kind: str) -> int:
    return list(launch_families.FAMILIES).index(launch_families.family_of(kind))


def _tiles(comparison: Comparison, analysis: Analysis) -> list[tuple[str, str, str, str]]:
    """The baseline's main numbers: (label, number, remark, "counted" or "estimated")."""
    traffic, memory = analysis.traffic, analysis.memory
    work, between = formats.format_flops(traffic.flops), formats.format_bytes(traffic.intermediate_bytes)
    saved = comparison.saved_bytes(comparison.baseline)
    saved_tile: list[tuple[str, str, str, str]] = []
    if saved is not None:
        percent, unfused = (
            sentences.saved_percent(comparison, comparison.baseline),
            formats.format_bytes(saved + traffic.bytes),
        )
        saved_tile = [("Saved by fusion", percent, f"{formats.format_bytes(saved)} of {unfused} unfused", "counted")]
    return [
        ("Launches", str(analysis.launch_count), _kinds_words(analysis), "counted"),
        ("HBM traffic", formats.format_bytes(traffic.bytes), "read and written", "counted"),
        *saved_tile,
        ("Between launches", between, "written by one launch, read by others", "counted"),
        (
            "Roofline time",
            formats.format_us(analysis.roofline_us),
            f"{work}, {traffic.intensity:.0f} FLOP/B",
            "estimated",
        ),
        (
            "Peak memory",
            "–" if sentences.peak_bytes(analysis) is None else formats.format_bytes(memory.peak_bytes),
            "no buffer assignment to count from"
            if sentences.peak_bytes(analysis) is None
            else f"{formats.format_bytes(memory.temp_bytes)} temporary",
            "counted",
        ),
    ]


def _kinds_words(analysis: Analysis) -> str:
    top = list(analysis.launches_by_kind.items())
    words_ = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in top[:3])
    rest = sum(count for _, count in top[3:])
    return f"{words_}, {rest} more" if rest else words_


def _traffic_bars(comparison: Comparison) -> list[dict[str, Any]]:
    """Widths, in percent of the longest bar, of each strategy's HBM traffic: between launches, and the rest."""
    done = [(result, result.analysis) for result in comparison.strategies if result.analysis is not None]
    longest = max((analysis.traffic.bytes for _, analysis in done), default=0) or 1
    return [
        {
            "name": result.name,
            "between": 100 * min(analysis.traffic.intermediate_bytes, analysis.traffic.bytes) / longest,
            "total": 100 * analysis.traffic.bytes / longest,
            "bytes": analysis.traffic.bytes,
            "between_bytes": analysis.traffic.intermediate_bytes,
        }
        for result, analysis in done
    ]


def _scope_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Makes the rows of the scope table: each cell has its launches and its share of the largest cell's time."""
    analyses = {result.name: result.analysis for result in comparison.strategies if result.analysis is not None}
    largest = max((cell.roofline_us for row in comparison.rows for cell in row.cells), default=0) or 1
    rows = []
    for row in fold_layers(
        comparison.rows, lambda row: (row.scope, row.phase), lambda row: _row_signature(row, analyses)
    ):
        if not isinstance(row, ScopeRow):
            first, last, count = row
            rows.append({"alike": f"{first} to {last}" if count > 1 else first, "count": count})
            continue
        cells = []
        for cell in row.cells:
            launches = analyses[cell.strategy].launches
            made = [launches[index] for index in cell.launches]
            guests = [launches[index] for index in cell.fused_into]
            hosts = {(launch.scope, launch.phase): launch for launch in reversed(guests)}
            cells.append(
                {
                    "strategy": cell.strategy,
                    "launches": made,
                    "kinds": _launched(made),
                    "hosts": list(reversed(hosts.values())),  # one for each scope that takes this one's work in
                    "bytes": cell.bytes,
                    "roofline_us": cell.roofline_us,
                    "heat": round(cell.roofline_us / largest, 3),
                }
            )
        parent, _, name = row.scope.rpartition("/")
        rows.append({"parent": parent, "name": name, "phase": row.phase, "cells": cells, "alike": ""})
    return rows


def _launched(launches: Sequence[Launch]) -> list[tuple[str, int]]:
    """Counts launches of one run by kind, most frequent first; those of a loop count as often as it runs."""
    counts: Counter[str] = Counter()
    for launch in launches:
        counts[launch.kind] += launch.repeat
    return [(kind, count) for kind, count in counts.most_common() if count]


def _row_signature(row: ScopeRow, analyses: Mapping[str, Analysis]) -> list[Any]:
    """What a row of the table shows, without names and numbers of launches."""
    return [
        (
            cell.strategy,
            cell.bytes,
            sorted(analyses[cell.strategy].launches[index].kind for index in cell.launches),
            sorted({without_numbers(analyses[cell.strategy].launches[index].scope) for index in cell.fused_into}),
        )
        for cell in row.cells
    ]


def _families_present(comparison: Comparison) -> list[tuple[str, str, str]]:
    """(family, label, meaning) of every kind of launch in the comparison, in the order of `FAMILIES`."""
    present = {
        launch_families.family_of(kind)
        for result in comparison.strategies
        if result.analysis is not None
        for kind in result.analysis.launches_by_kind
    }
    return [(family, *said) for family, said in launch_families.FAMILIES.items() if family in present]


def _provenance(comparison: Comparison) -> list[tuple[str, str]]:
    """How the numbers were made: from the baseline, or else the first strategy that has an analysis."""
    done = [result.analysis for result in comparison.strategies if result.analysis is not None]
    analysis = comparison[comparison.baseline].analysis or (done[0] if done else None)
    if analysis is None:
        return []
    origin: Provenance = analysis.provenance
    device = analysis.device
    peaks = ", ".join(f"{name} {flops / 1e12:.0f} TFLOP/s" for name, flops in device.matrix_flops)
    facts = [
        ("Function", f"{origin.function}, {origin.mode}"),
        ("Arguments", ", ".join(origin.arguments)),
        ("Target", f"{origin.target}: {device.description}"),
        ("Peaks of the roofline", f"{device.memory_bandwidth / 1e12:.2f} TB/s, {peaks} ({device.source})"),
        ("GEMM choice", sentences.gemm_choice(origin)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in origin.versions)),
        ("Captured", f"{origin.created}, {sum(item.provenance.compile_seconds for item in done):.1f} s of compiling"),
    ]
    notes = [f"{', '.join(names)}: {note}" if names else note for names, note in sentences.caveats(comparison)]
    return [*((name, said) for name, said in facts if said), *(("Not known", note) for note in notes)]
