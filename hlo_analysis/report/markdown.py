"""Renders a comparison as Markdown, for an issue or a pull request: what to do, where the time goes, strategies."""

from __future__ import annotations

from hlo_analysis.records import Analysis, Comparison
from hlo_analysis.report import sentences
from hlo_analysis.report.advice import Advice, advice, effect_text, program_us, winning_code
from hlo_analysis.report.alike import distinct, twin_sentences
from hlo_analysis.report.changes import markdown_table
from hlo_analysis.report.formats import format_us, units_of
from hlo_analysis.report.time_groups import time_groups


def render_markdown(comparison: Comparison, *, remedies: int = 5, groups: int = 8) -> str:
    """Returns the comparison as Markdown, in the order of the page."""
    twins = twin_sentences(comparison)
    comparison = distinct(comparison)
    first, *others = sentences.verdict_sentences(comparison)
    base = comparison[comparison.baseline].analysis
    versions = "" if base is None else f", {sentences.compiled_by(base.provenance)}"
    lines = [f"### {comparison.title}{versions}", "", f"**{first}**", "", " ".join(others)]
    if code := winning_code(comparison):
        lines += ["", "```python", code, "```"]
    if base is not None:
        if found := advice(base):
            lines += ["", "#### What to do", ""]
            lines += [line for item in found[:remedies] for line in _advice(base, item)]
        lines += ["", "#### Where the time goes", "", *markdown_table(_times(base, groups))]
    lines += ["", "#### Strategies", "", *markdown_table(_strategies(comparison))]
    notes = twins + [note for names, note in sentences.caveats(comparison) if not names or comparison.baseline in names]
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def _advice(analysis: Analysis, item: Advice) -> list[str]:
    how = "verified" if item.is_verified else item.first.how
    text = dict(analysis.source_lines).get(item.first.source or "")
    lines = [f"1. **{item.name}**, {item.place or 'no scope'}: {effect_text(analysis, item)} ({how})"]
    lines += [f"   `{text}`"] if text else []
    lines += [f"   {item.first.cause}"]
    if item.is_open:
        lines += [f"   *{item.first.remedy_kind}*: {item.first.remedy}"]
        lines += (
            ["   ```python", *(f"   {line}" for line in item.first.code.splitlines()), "   ```"]
            if item.first.code
            else []
        )
    elif item.trial is not None:
        lines += [f"   tried: {sentences.trial_text(item.trial)}"]
    return lines


def _times(analysis: Analysis, count: int) -> list[tuple[str, ...]]:
    whole = program_us(analysis) or 1
    rows = [
        (
            f"{group.name} ×{group.scopes}" if group.scopes > 1 and "*" in group.name else group.name,
            format_us(group.time_us),
            f"{group.time_us / whole:.0%}",
            str(group.count),
        )
        for group in time_groups(analysis)[:count]
    ]
    return [("scope", "time", "share", "launches"), *((f"`{name}`", *rest) for name, *rest in rows)]


def _strategies(comparison: Comparison) -> list[tuple[str, ...]]:
    units = units_of(comparison)
    base = comparison[comparison.baseline].analysis
    head = (
        "strategy", "launches", f"{sentences.memory_name(comparison)}, {units.traffic.name}",
        f"estimate, {units.time.name}", f"measured, {units.time.name}", f"peak, {units.memory.name}",
    )  # fmt: skip
    rows = [
        (
            result.name, str(made.launch_count), units.traffic.show(made.traffic.bytes),
            sentences.time_text(made.estimated_us, made, base, units.time), units.time.show(result.measured_us),
            units.memory.show(sentences.peak_bytes(made)),
        )
        for result in comparison.strategies
        if (made := result.analysis) is not None
    ]  # fmt: skip
    return [head, *rows]
