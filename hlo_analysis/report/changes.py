"""Formats the difference of two analyses as plain text, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from hlo_analysis.changes import Change, Difference, Kind
from hlo_analysis.records import Analysis, Launch
from hlo_analysis.report.formats import format_bytes, format_change, format_us, plural

_TITLES: dict[Kind, str] = {
    "merged": "Merged: several launches of A are one in B",
    "split": "Split: one launch of A is several in B",
    "regrouped": "Regrouped: the same work in other launches",
    "gained": "Gained: no launch of A shows their work (a library call may do it inside)",
    "lost": "Lost: no launch of B shows their work (a library call may do it inside)",
    "changed": "Changed: the same work, with other traffic or by another kind of kernel",
}


def difference_lines(found: Difference, count: int = 10) -> list[str]:
    """Returns the difference as text: totals, scopes that differ, up to `count` changes of each kind, notes."""
    lines = [f"A: {_side(found.before)}", f"B: {_side(found.after)}", ""]
    lines += _table(_totals_table(found))
    if rows := _scopes_table(found):
        lines += ["", *_table(rows)]
    for title, changes in _by_kind(found):
        lines += ["", f"{title} ({len(changes)})"]
        lines += [line for names, effect in changes[:count] for line in (f"  {names}", f"      {effect}")]
        lines += [f"  and {len(changes) - count} more"] if len(changes) > count else []
    if not found.changes:
        lines += ["", _NONE]
    if found.notes:
        lines += ["", *(f"note: {note}" for note in found.notes)]
    return lines


_NONE = "Every launch does the same work on both sides."


def _by_kind(found: Difference) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields the title of each kind of change, with the launches and the effect of each change."""
    for kind, title in _TITLES.items():
        if changes := [_change(found.before, found.after, change) for change in found.changes if change.kind == kind]:
            yield title, changes


def difference_markdown(found: Difference, count: int = 10) -> str:
    """Returns the difference for an issue or a pull request: `difference_lines` as Markdown."""
    lines = [f"### {found.before.label} → {found.after.label}: {found.before.provenance.function}", ""]
    lines += [f"A: {_side(found.before)}; B: {_side(found.after)}", "", *markdown_table(_totals_table(found))]
    if rows := _scopes_table(found):
        lines += ["", "<details><summary>Scopes that differ</summary>", "", *markdown_table(rows), "", "</details>"]
    for title, changes in _by_kind(found):
        lines += ["", f"**{title}** ({len(changes)})", ""]
        lines += [f"- `{names}`: {effect}" for names, effect in changes[:count]]
        lines += [f"- and {len(changes) - count} more"] if len(changes) > count else []
    if not found.changes:
        lines += ["", _NONE]
    if found.notes:
        lines += ["", "<details><summary>Versions and options that differ</summary>", ""]
        lines += [*(f"- {note}" for note in found.notes), "", "</details>"]
    return "\n".join(lines) + "\n"


def _totals_table(found: Difference) -> list[tuple[str, ...]]:
    before, after = found.before, found.after
    return [
        ("", "A", "B", ""),
        ("launches (counted)", *_counts(before.launch_count, after.launch_count)),
        ("HBM traffic (counted)", *_sizes(before.traffic.bytes, after.traffic.bytes)),
        ("time (estimated)", *_times(before.estimated_us, after.estimated_us)),
    ]


def _scopes_table(found: Difference) -> list[tuple[str, ...]]:
    """Returns a head and a row for each scope that differs; nothing if none does."""
    rows = [
        (
            (scope.scope or "no scope") + (" (backward)" if scope.phase == "backward" else ""),
            *_counts(scope.launches_before, scope.launches_after)[:2],
            *_sizes(scope.bytes_before, scope.bytes_after),
        )
        for scope in found.scopes
        if not scope.is_equal
    ]
    return [("scope", "launches A", "B", "HBM traffic A", "B", ""), *rows] if rows else []


def markdown_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns a table of Markdown, the first row its head; columns but the first are aligned to the right."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    head, *others = [f"| {' | '.join(row)} |" for row in cells]
    return [head, f"| --- |{' ---: |' * (len(rows[0]) - 1)}", *others]


def difference_json(found: Difference) -> str:
    """Returns the difference as JSON: totals of both sides, scopes, changes with the launches' names, notes."""
    data = {
        "before": _totals(found.before),
        "after": _totals(found.after),
        "notes": list(found.notes),
        "scopes": [asdict(scope) for scope in found.scopes],
        "changes": [
            {
                **asdict(change),
                "before_names": [found.before.launches[index].name for index in change.before],
                "after_names": [found.after.launches[index].name for index in change.after],
            }
            for change in found.changes
        ],
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _totals(analysis: Analysis) -> dict[str, object]:
    return {
        "label": analysis.label,
        "target": analysis.provenance.target,
        "launches": analysis.launch_count,
        "hbm_bytes": analysis.traffic.bytes,
        "estimated_us": round(analysis.estimated_us, 3),
    }


def _side(analysis: Analysis) -> str:
    made = analysis.provenance
    return f"{analysis.label}: {made.function}, {made.mode}, {made.target}"


def _change(before: Analysis, after: Analysis, change: Change) -> tuple[str, str]:
    """Returns the launches of a change, and its bytes, estimated times and scopes."""
    sides = (_names(before, change.before), _names(after, change.after))
    moved = (change.bytes_before, change.bytes_after)
    times = (_time(before, change.before), _time(after, change.after))
    sizes = " → ".join(format_bytes(size) for size, names in zip(moved, sides, strict=True) if names)
    took = " → ".join(format_us(time) for time, names in zip(times, sides, strict=True) if names)
    scopes = dict.fromkeys(
        launch.scope
        for launch in (*(before.launches[i] for i in change.before), *(after.launches[i] for i in change.after))
        if launch.scope
    )
    where = f", {', '.join(scopes)}" if scopes else ""
    return " → ".join(filter(None, sides)), f"{sizes}, {took} (estimated){where}"


def _time(analysis: Analysis, indices: Sequence[int]) -> float:
    return sum(analysis.launches[index].estimated_us * analysis.launches[index].repeat for index in indices)


def _names(analysis: Analysis, indices: Sequence[int]) -> str:
    shown = [_name(analysis.launches[index]) for index in indices[:6]]
    more = f" and {plural(len(indices) - 6, 'more launch')}" if len(indices) > 6 else ""
    return " + ".join(shown) + more


def _name(launch: Launch) -> str:
    return f"#{launch.index} {launch.name} ({launch.kind})"


def _counts(before: int, after: int) -> tuple[str, str, str]:
    return str(before), str(after), f"{after - before:+d}".replace("-", "−") if after != before else "="


def _sizes(before: int, after: int) -> tuple[str, str, str]:
    return format_bytes(before), format_bytes(after), format_change(after, before)


def _times(before: float, after: float) -> tuple[str, str, str]:
    return format_us(before), format_us(after), format_change(after, before)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Aligns columns to their widest cell, the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
