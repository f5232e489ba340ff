"""Renders a comparison as one HTML file, which needs no network and escapes all text of the program."""

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

from hlo_analysis.records import Analysis, Comparison, Launch, Measured, Provenance, ScopeRow, StrategyResult
from hlo_analysis.report import formats, launch_families, sentences
from hlo_analysis.report.advice import winning_code
from hlo_analysis.report.alike import distinct
from hlo_analysis.report.formats import Units, units_of
from hlo_analysis.report.payload import embedded_json, page_ptx, payload, totals
from hlo_analysis.report.ranking import is_lower_bound, ranking, rival
from hlo_analysis.report.similar_layers import fold_layers, without_numbers
from hlo_analysis.report.times import measured_sentences

STYLES = ("page.css", "tables.css", "sections.css", "charts.css", "cards.css")
SCRIPTS = (
    "data.js",
    "links.js",
    "tip.js",
    "remedy.js",
    "card.js",
    "strategies.js",
    "roofline.js",
    "launches.js",
    "values.js",
    "advice.js",
    "times.js",
    "decisions.js",
    "columns.js",
    "zoom.js",
    "graph.js",
    "search.js",
    "main.js",
)


def render_html(comparison: Comparison) -> str:
    """Returns the whole page.

    Raises:
        KeyError: the comparison's baseline is not one of its strategies.
    """
    comparison = distinct(comparison)
    base = comparison[comparison.baseline]
    shown = base.analysis or next((each.analysis for each in comparison.strategies if each.analysis), None)
    memory = sentences.memory_name(comparison)
    strategies = [
        _strategy(comparison, result, base.analysis, units_of(comparison)) for result in comparison.strategies
    ]
    script = Markup(_static(SCRIPTS))
    ptx = page_ptx(comparison)
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
            strategies=strategies,
            code=winning_code(comparison),
            rival=rival(comparison),
            ranking=ranking(comparison),
            bars=_traffic_bars(comparison),
            rows=_scope_rows(comparison),
            has_scopes=any(
                launch.scope for each in comparison.strategies if each.analysis for launch in each.analysis.launches
            ),
            provenance=_provenance(comparison),
            limits=len(sentences.caveats(comparison)),
            measured_notes=[note for _, note in measured_sentences(comparison)],
            families=_families_present(comparison),
            has_measured=any(result.measured_us is not None for result in comparison.strategies),
            has_stale=any(each["stale"] for each in strategies),
            memory=memory,
            memory_title=memory[0].upper() + memory[1:],
            is_gpu=shown is None or not shown.device.is_cpu,
            compiled_by="" if shown is None else sentences.compiled_by(shown.provenance),
            has_wall=any(result.wall_us is not None for result in comparison.strategies),
            has_links=any(each.analysis and each.analysis.exposed_us is not None for each in comparison.strategies),
            has_numerics=any(result.numerics is not None for result in comparison.strategies),
            data=Markup(embedded_json(payload(comparison, ptx))),
            ptx=Markup(embedded_json(ptx)),
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
        code=_code,
        last_scope=sentences.last_scope,
    )
    environment.globals.update(change=formats.format_change, family_descriptions=launch_families.FAMILIES)
    return environment


def _code(text: str) -> Markup:
    """Escapes the text and shows what is in backquotes as code."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 and place < len(parts) - 1 else escape(part)
        for place, part in enumerate(parts)
    )


def _breakable(name: str) -> Markup:
    """Escapes the name and lets a line break after each underscore."""
    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


@cache
def _static(names: tuple[str, ...]) -> str:
    folder = files("hlo_analysis.report") / "static"
    return "\n" + "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def _sha256(text: str) -> str:
    """Returns the script's hash for the content security policy; no other script may run on the page."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _strategy(comparison: Comparison, result: StrategyResult, base: Analysis | None, units: Units) -> dict[str, Any]:
    analysis = result.analysis
    shown: dict[str, Any] = {
        "result": result,
        "analysis": analysis,
        "numerics": sentences.numerics_text(result.numerics),
        "sites": Counter(result.sites),
        "stale": _stale(result),
    }
    if analysis is None:
        return shown
    return shown | {
        "totals": totals(result, analysis),
        "saved_bytes": comparison.saved_bytes(result.name),
        "saved_percent": sentences.saved_percent(comparison, result.name),
        "roofline": sentences.time_text(analysis.roofline_us, analysis, base, units.time),
        "estimate": sentences.time_text(analysis.estimated_us, analysis, base, units.time),
        "is_lower_bound": is_lower_bound(analysis, base),
        "gemm": sentences.gemm_choice(analysis.provenance),
        "kinds": sorted(analysis.launches_by_kind.items(), key=lambda item: _family_place(item[0])),
    }


def _stale(result: StrategyResult) -> Measured | None:
    """Returns a measurement that is not of this program, on this GPU and of this version, if it has a time."""
    measured = None if result.analysis is None else result.analysis.measured
    return measured if measured and measured.differs and measured.kernel_us is not None else None


def _family_place(kind: str) -> int:
    return list(launch_families.FAMILIES).index(launch_families.family_of(kind))


def _traffic_bars(comparison: Comparison) -> list[dict[str, Any]]:
    """Returns each strategy's HBM traffic, between launches and the rest, in percent of the longest bar."""
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
    """Builds the rows of the scope table: each cell has its launches and its share of the largest cell's time."""
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
                    "hosts": list(reversed(hosts.values())),  # one for each scope with launches that include this work
                    "count": sum(launch.repeat for launch in made),
                    "bytes": cell.bytes,
                    "roofline_us": cell.roofline_us,
                    "heat": round(cell.roofline_us / largest, 3),
                }
            )
        name = sentences.last_scope(row.scope) if any(map(str.isalpha, row.scope)) else row.scope
        parent = row.scope[: len(row.scope) - len(name)].rstrip("/")
        rows.append(
            {"scope": row.scope, "parent": parent, "name": name, "phase": row.phase, "cells": cells, "alike": ""}
        )
    return rows


def _launched(launches: Sequence[Launch]) -> list[tuple[str, int]]:
    """Counts the launches of one run by kind, most frequent first; those in loops count once per iteration."""
    counts: Counter[str] = Counter()
    for launch in launches:
        counts[launch.kind] += launch.repeat
    return [(kind, count) for kind, count in counts.most_common() if count]


def _row_signature(row: ScopeRow, analyses: Mapping[str, Analysis]) -> list[Any]:
    """Returns what a row of the table shows, without names and numbers of launches."""
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
    """Returns (family, label, meaning) of every kind of launch in the comparison, in the order of `FAMILIES`."""
    present = {
        launch_families.family_of(kind)
        for result in comparison.strategies
        if result.analysis is not None
        for kind in result.analysis.launches_by_kind
    }
    return [(family, *said) for family, said in launch_families.FAMILIES.items() if family in present]


def _provenance(comparison: Comparison) -> list[tuple[str, str]]:
    """Describes how the numbers were made, for the baseline or else the first strategy with an analysis."""
    done = [result.analysis for result in comparison.strategies if result.analysis is not None]
    analysis = comparison[comparison.baseline].analysis or (done[0] if done else None)
    if analysis is None:
        return []
    origin: Provenance = analysis.provenance
    device = analysis.device
    peaks = ", ".join((f"{device.memory_bandwidth / 1e12:.2f} TB/s", *device.matrix_peaks))
    facts = [
        ("Function", sentences.program_name(origin)),
        ("Arguments", ", ".join(origin.arguments)),
        ("Target", f"{origin.target}: {device.description}"),
        ("Peaks of the roofline", f"{peaks} ({device.source})"),
        ("GEMM choice", sentences.gemm_choice(origin)),
        ("Versions", ", ".join(f"{name} {version}" for name, version in origin.versions)),
        ("Captured", origin.created),
        ("Seconds to lower and compile", sentences.seconds_to_compile(comparison)),
    ]
    notes = [f"{', '.join(names)}: {note}" if names else note for names, note in sentences.caveats(comparison)]
    return [*((name, said) for name, said in facts if said), *(("Not known", note) for note in notes)]
