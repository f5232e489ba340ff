"""Makes the pages of docs/studies and the tables of docs/studies.md from committed results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from xlafuse.bench.results import markdown_table
from xlafuse.studies.records import Conclusion, Study, StudyResult

_COLUMNS = {
    "us": ("µs", 1.0),
    "launches": ("launches", 1.0),
    "bytes": ("HBM MB", 1e-6),
    "temp_bytes": ("temporary MB", 1e-6),
    "registers": ("registers", 1.0),
    "spill_bytes": ("spilled bytes", 1.0),
    "occupancy": ("occupancy", 1.0),
    "dram_read_bytes": ("DRAM read MB", 1e-6),
    "dram_write_bytes": ("DRAM written MB", 1e-6),
    "l2_hits": ("L2 hits %", 1.0),
    "saved_bytes": ("saved MB", 1e-6),
    "saved_us": ("saved µs", 1.0),
    "roofline_us": ("roofline µs", 1.0),
    "compile_s": ("compile s", 1.0),
    "peak_bytes": ("peak MB", 1e-6),
    "break_even_steps": ("break-even steps", 1.0),
    "error_with_x": ("error, x alone", 1.0),
    "error_with_residual": ("with residual", 1.0),
    "error_with_scale": ("with scale", 1.0),
    "error_with_bias": ("with bias", 1.0),
    "same_trajectories": ("same trajectories", 1.0),
}


def overview(studies: Sequence[tuple[Study, Conclusion]]) -> str:
    """Makes the table of every claim with its source, the published figure, ours and the verdict."""
    rows = [
        [
            f"[{claim.text}](studies/{study.name}.md)",
            claim.source,
            claim.published,
            finding.ours,
            finding.verdict,
        ]
        for study, conclusion in studies
        for claim, finding in zip(study.claims, conclusion.findings, strict=True)
    ]
    return markdown_table(("claim", "source", "published", "ours", "verdict"), rows, "lllll")


def page(study: Study, result: StudyResult, *, has_plot: bool) -> str:
    """Makes a study's page."""
    conclusion = study.conclude(result)
    parts = [f"# {study.title}", " ".join(conclusion.sentences)]
    for claim, finding in zip(study.claims, conclusion.findings, strict=True):
        text = f"- {claim.text} ({claim.source}). Published: {claim.published}. Ours: {finding.ours}. "
        parts.append(f"{text}**{finding.verdict.capitalize()}.** {finding.reason}".rstrip())
    if has_plot:
        parts.append(f"![{study.title}]({study.name}.svg)")
    parts.append(table(result))
    parts.append("\n".join(_provenance(study, result)))
    return "\n\n".join(parts) + "\n"


def table(result: StudyResult) -> str:
    """Makes a table with a row for each variant of each case."""
    known = [name for name in _COLUMNS if result.has(name) and (name != "roofline_us" or not result.has("us"))]
    rows = []
    for case in result.cases:
        for i, variant in enumerate(result.variants(case)):
            cells = [_cell(result.value(case, variant, name), _COLUMNS[name][1]) for name in known]
            rows.append(["" if i else case, variant, *cells])
    return markdown_table(("case", "variant", *(_COLUMNS[name][0] for name in known)), rows, "ll" + "r" * len(known))


def _cell(value: float, scale: float) -> str:
    if math.isnan(value):
        return "–"
    value *= scale
    if value and abs(value) < 0.01:
        return f"{value:.1g}"
    digits = 0 if value == round(value) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _provenance(study: Study, result: StudyResult) -> list[str]:
    lines = []
    for part in result.parts:
        what = "Measured on" if part.basis == "measured" else "Counted for"
        where = f", commit {part.environment.commit}" if part.environment and part.environment.commit else ""
        lines.append(f"{what} {part.target}, {part.started[:10]}{where}.")
    if any(row.note == "recorded" for row in result.rows):
        lines.append("Times were recorded on an NVIDIA H200 and are read from the repository.")
    lines += [f"Left out: {' '.join(note.split())[:200]}." for part in result.parts for note in part.left_out]
    lines.append(f"Again: `xlafuse study {study.name}`; with `--target attached` on a GPU.")
    return list(dict.fromkeys(lines))


def _having(values: Mapping[str, Mapping[str, float]], variant: str) -> list[tuple[int, Mapping[str, float]]]:
    return [(i, each) for i, each in enumerate(values.values()) if variant in each]


def plot(study: Study, result: StudyResult, path: Path) -> bool:
    """Draws the study's quantity with a group of bars for each case; returns False if there is nothing to draw."""
    import matplotlib.pyplot as plt

    quantity, label = study.quantity
    values: Mapping[str, Mapping[str, float]] = {
        case: {
            variant: value
            for variant in result.variants(case)
            if not math.isnan(value := result.value(case, variant, quantity))
        }
        for case in result.cases
    }
    values = {case: each for case, each in values.items() if each}
    if not values:
        return False
    plt.rcParams.update({"svg.hashsalt": "xlafuse", "svg.fonttype": "none", "font.size": 8})
    variants = list(dict.fromkeys(variant for each in values.values() for variant in each))
    figure, axes = plt.subplots(figsize=(8, 3.2))
    width = 0.85 / max(map(len, values.values()))
    for variant in variants:
        places = [i + (list(each).index(variant) - (len(each) - 1) / 2) * width for i, each in _having(values, variant)]
        heights = [each[variant] for _, each in _having(values, variant)]
        axes.bar(
            places, heights, width * 0.92, label=variant, color=plt.get_cmap("tab20")(variants.index(variant) % 20)
        )
    shown = [value for each in values.values() for value in each.values() if value > 0]
    if shown and max(shown) > 8 * min(shown):
        axes.set_yscale("log")
        for each in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            each(lambda value, _: f"{value:,g}" if f"{value:e}"[0] in "125" else "")
    rotation = 0 if len(values) * max(map(len, values)) < 90 else 25
    axes.set_xticks(range(len(values)), list(values), rotation=rotation, ha="right" if rotation else "center")
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    columns = min(len(variants), 4 if len(variants) < 9 else 3)
    axes.legend(frameon=False, fontsize=7, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    return True
