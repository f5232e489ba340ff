"""Tables of the block and model benchmarks for docs/results.md."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from xlafuse.bench.block import batch_and_length
from xlafuse.bench.results import Results, ShapeResult, markdown_table
from xlafuse.bench.rows import RIVALS, rate

_MODES = {"forward": "forward", "grad": "forward + backward"}


def block_overview(results: Results) -> str:
    """Makes the table of kernel times: a row a case, a column a strategy or library, the fastest in bold."""
    cases, names = _cases(results), _columns(results)
    lines = []
    for case in cases:
        fastest = min((c.timing.median_us for c in case.candidates), default=math.nan)
        times = [case.microseconds(name) for name in names]
        cells = ["–" if math.isnan(us) else f"**{_shown(us)}**" if us == fastest else _shown(us) for us in times]
        lines.append([*_title(case), *cells])
    return f"{_caption(results)}\n\n{markdown_table(_header(names), lines, 'lll' + 'r' * len(names))}"


def block_details(results: Results) -> str:
    """Makes the table of wall-clock times, rates, launches, clocks and power, and lists what failed."""
    names = _columns(results)
    lines = []
    for case in _cases(results):
        found = {c.name: c.timing for c in case.candidates}
        cells = [
            f"{_shown(found[name].wall_us)}, {rate(case, name)}, {len(found[name].kernels)}" if name in found else "–"
            for name in names
        ]
        lines.append([*_title(case), *cells, activity_words(case)])
    parts = [
        "Wall clock of a call in µs, rate by kernel time, number of launches; clock and power meanwhile.",
        markdown_table([*_header(names), "clock, power"], lines, "lll" + "r" * len(names) + "l"),
    ]
    problems = [
        f"- {case.phase} {case.op} {case.spec}, {problem.candidate}: {' '.join(problem.message.split())[:160]}"
        for case in _cases(results)
        for problem in case.problems
    ]
    return "\n\n".join([*parts, *(["Not measured:", "\n".join(problems)] if problems else [])])


def model_table(results: Results) -> str:
    """Formats the table of whole models: one row for each strategy or library, timed in turns.

    A model's share of the peak and the error are shown where they were measured.
    """
    measured = [each for case in results.shapes for each in case.candidates]
    has_share, has_error = (any(getattr(c, name) is not None for c in measured) for name in ("flops_share", "error"))
    rows = []
    for case in results.shapes:
        for i, each in enumerate(case.candidates):
            timing = each.timing
            rows.append(
                [
                    *(("", "", "") if i else (case.op, case.phase, re.sub(r"(?<=\d) ?x ?(?=\d)", " × ", case.spec))),
                    _label(each.name),
                    f"{timing.wall_us / 1e3:.2f}",
                    _or_dash(each.tokens_per_second, "{:,.0f}") + (f" {case.unit}" if case.unit != "tokens" else ""),
                    f"{timing.median_us / 1e3:.2f}" if timing.kernels else "–",
                    f"{len(timing.kernels) or '–'}",
                    *([_or_dash(each.flops_share, "{:.1%}")] if has_share else []),
                    _or_dash(each.lower_seconds, "{:.1f}"),
                    _or_dash(each.compile_seconds, "{:.1f}"),
                    _or_dash(each.peak_bytes and each.peak_bytes / 1e9, "{:.1f}"),
                    *([_or_dash(each.error, "{:.2g}")] if has_error else []),
                ]
            )
    header = ["model", "phase", "size", "", "wall ms", "tokens/s", "kernels ms", "launches"]
    header += ["MFU"] * has_share + ["lower s", "compile s", "GB"] + ["error"] * has_error
    return f"{_device(results)}.\n\n{markdown_table(header, rows, 'llll' + 'r' * (len(header) - 4))}"


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _cases(results: Results) -> list[ShapeResult]:
    def order(case: ShapeResult) -> tuple[str, int, int]:
        return case.op, list(_MODES).index(case.phase), -math.prod(batch_and_length(case.spec))

    return sorted(results.shapes, key=order)


def _columns(results: Results) -> list[str]:
    """Returns the column names: strategies first, then libraries, each in the order of the file."""
    found = {c.name: c.kind == "peer" for case in results.shapes for c in case.candidates}
    return sorted(found, key=lambda name: found[name])


def _header(names: Sequence[str]) -> list[str]:
    return ["block", "batch × length", "", *map(_label, names)]


def _label(name: str) -> str:
    """Returns a library's label, or a strategy's name; "xla" is a strategy here."""
    return f"`{name}`" if name == "xla" else RIVALS.get(name, f"`{name}`")


def _title(case: ShapeResult) -> list[str]:
    return [case.op, case.spec.replace("x", " × "), _MODES[case.phase]]


def _device(results: Results) -> str:
    runs = [run for run in results.runs if run.shapes]
    device = ", ".join(dict.fromkeys(run.environment.device_kind for run in runs))
    days = ", ".join(dict.fromkeys(run.started[:10] for run in runs))
    commits = ", ".join(dict.fromkeys(run.environment.commit for run in runs if run.environment.commit))
    return f"{device}, {days}{f', commit {commits}' if commits else ''}"


def _caption(results: Results) -> str:
    return (
        f"{_device(results)}. µs of all kernels of a call (CUPTI), median; in a row all took turns in one run. One "
        "token a sequence is a decoding step without its cache."
    )


def _shown(us: float) -> str:
    return f"{us:.0f}" if us >= 1000 else f"{us:.1f}"


def activity_words(result: ShapeResult) -> str:
    """Formats the range of clock and power while the candidates took turns; "" if nvidia-smi gave no samples."""
    found = result.activity.quantities if result.activity and result.activity.samples else {}
    units = {"sm_clock_mhz": "MHz", "power_watts": "W"}
    return ", ".join(
        f"{found[name].least:.0f}–{found[name].most:.0f} {unit}" for name, unit in units.items() if name in found
    )
