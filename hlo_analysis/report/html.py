"""The report as one HTML file: no network, works from file://, every text from the program escaped."""

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
from hlo_analysis.report import kinds, words
from hlo_analysis.report.alike import fold_layers, without_numbers
from hlo_analysis.report.payload import embedded_json, payload, totals
from hlo_analysis.report.units import Units, units_of

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
            verdict=words.verdict_sentences(comparison),
            strategies=[_strategy(comparison, result, base.analysis, units) for result in comparison.strategies],
            tiles=_tiles(comparison, base.analysis) if base.analysis else [],
            bars=_traffic_bars(comparison),
            rows=_scope_rows(comparison),
            provenance=_provenance(comparison),
            caveats=[note for names, note in words.notes(comparison) if not names or base.name in names],
            families=_families_present(comparison),
            has_measured=any(result.measured_us is not None for result in comparison.strategies),
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
        bytes=words.format_bytes,
        us=words.format_us,
        family=kinds.family_of,
        breakable=_breakable,
    )
    environment.globals.update(change=words.format_change, family_words=kinds.FAMILIES)
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
    made: dict[str, Any] = {"result": result, "analysis": analysis, "numerics": words.numerics_words(result.numerics)}
    if analysis is None:
        return made
    return made | {
        "totals": totals(result, analysis),
        "saved_bytes": comparison.saved_bytes(result.name),
        "saved_percent": words.saved_percent(comparison, result.name),
        "roofline": words.roofline_words(analysis, base, units.time),
        "is_lower_bound": words.is_lower_bound(analysis, base),
        "gemm": words.gemm_words(analysis.provenance),
        "kinds": sorted(analysis.launches_by_kind.items(), key=lambda item: _family_place(item[0])),
    }


def _family_place(kind: str) -> int:
    return list(kinds.FAMILIES).index(kinds.family_of(kind))


def _tiles(comparison: Comparison, analysis: Analysis) -> list[tuple[str, str, str, str]]:
    """(label, number, remark, counted or estimated) of the baseline."""
    traffic, memory = analysis.traffic, analysis.memory
    work, between = words.format_flops(traffic.flops), words.format_bytes(traffic.intermediate_bytes)
    saved = comparison.saved_bytes(comparison.baseline)
    saved_tile: list[tuple[str, str, str, str]] = []
    if saved is not None:
        percent, unfused = (
            words.saved_percent(comparison, comparison.baseline),
            words.format_bytes(saved + traffic.bytes),
        )
        saved_tile = [("Saved by fusion", percent, f"{words.format_bytes(saved)} of {unfused} unfused", "counted")]
    return [
        ("Launches", str(analysis.launch_count), _kinds_words(analysis), "counted"),
        ("HBM traffic", words.format_bytes(traffic.bytes), "read and written", "counted"),
        *saved_tile,
        ("Between launches", between, "written by one, read by others", "counted"),
        (
            "Roofline time",
            words.format_us(analysis.roofline_us),
            f"{work}, {traffic.intensity:.0f} FLOP/B",
            "estimated",
        ),
        (
            "Peak memory",
            "–" if words.peak_bytes(analysis) is None else words.format_bytes(memory.peak_bytes),
            "no buffer assignment to count it from"
            if words.peak_bytes(analysis) is None
            else f"{words.format_bytes(memory.temp_bytes)} temporary",
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
    """The aligned rows, each cell with its launches and its share of the largest cell."""
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
    """Launches of one run by kind, most frequent first; a loop's count as often as it runs."""
    counts: Counter[str] = Counter()
    for launch in launches:
        counts[launch.kind] += launch.repeat
    return [(kind, count) for kind, count in counts.most_common() if count]


def _row_signature(row: ScopeRow, analyses: Mapping[str, Analysis]) -> list[Any]:
    """What a row of the table shows, but for names and numbers of launches."""
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
    """(family, label, meaning) of every kind of launch in the comparison, in the order of `kinds.FAMILIES`."""
    present = {
        kinds.family_of(kind)
        for result in comparison.strategies
        if result.analysis is not None
        for kind in result.analysis.launches_by_kind
    }
    return [(family, *said) for family, said in kinds.FAMILIES.items() if family in present]


def _provenance(comparison: Comparison) -> list[tuple[str, str]]:
    """What the numbers rest on, from the baseline or the first strategy that has an analysis."""
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
        ("GEMM choice", words.gemm_words(origin)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in origin.versions)),
        ("Captured", f"{origin.created}, {sum(item.provenance.compile_seconds for item in done):.1f} s of compiling"),
    ]
    notes = [f"{', '.join(names)}: {note}" if names else note for names, note in words.notes(comparison)]
    return [*((name, said) for name, said in facts if said), *(("Not known", note) for note in notes)]
