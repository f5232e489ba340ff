"""Strategies side by side: launches aligned by the model's named scopes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hlo_analysis.hlo.scope import scope_of
from hlo_analysis.records import Analysis, Comparison, Launch, Phase, ScopeCell, ScopeRow, StrategyResult

Key = tuple[str, Phase]

# Instructions that do no work of their own: their scope says nothing about where a launch's work belongs.
_SILENT_OPCODES = ("parameter", "constant", "bitcast", "broadcast", "iota", "tuple", "get-tuple-element", "copy")


def compare_analyses(title: str, results: Sequence[StrategyResult], baseline: str) -> Comparison:
    """Aligns the strategies' launches by (scope, phase), in program order.

    A launch counts under its own scope. Where its fused instructions also belong to another scope (a residual add
    inside a norm, say), that scope's cell names the launch in `fused_into` and counts no bytes for it.

    Args:
        title: what was compared, for people.
        results: one entry a strategy; those without an analysis take no part in the rows.
        baseline: the strategy that differences are taken against.

    Raises:
        ValueError: `baseline` is none of `results`, or two of them have one name.
    """
    names = [result.name for result in results]
    if len(set(names)) != len(names):
        raise ValueError(f"expected one result a strategy, got {names}")
    if baseline not in names:
        raise ValueError(f"expected the baseline among the strategies {names}, got {baseline!r}")
    analyses = {result.name: result.analysis for result in results if result.analysis is not None}
    own = {name: _launches_by_scope(analysis) for name, analysis in analyses.items()}
    guests = {name: _guests_by_scope(analysis) for name, analysis in analyses.items()}
    rows = tuple(
        ScopeRow(
            scope=scope,
            phase=phase,
            cells=tuple(
                _cell(name, own[name].get((scope, phase), ()), guests[name].get((scope, phase), ()))
                for name in analyses
            ),
        )
        for scope, phase in _program_order(own, guests, analyses)
    )
    return Comparison(title=title, baseline=baseline, strategies=tuple(results), rows=rows)


def scopes_within(launch: Launch) -> tuple[Key, ...]:
    """Every (scope, phase) with an instruction in the launch, its own first, then as its text names them.

    Scopes that enclose the launch's own are left out: they add nothing.
    """
    own: Key = (launch.scope, launch.phase)
    found: dict[Key, None] = {own: None}
    for line in launch.hlo.splitlines():
        if any(f" {opcode}(" in line for opcode in _SILENT_OPCODES):
            continue
        for op_name in _op_names(line):
            key = scope_of(op_name)
            if key[0] and not f"{launch.scope}/".startswith(f"{key[0]}/"):
                found.setdefault(key, None)
    return tuple(found)


def _op_names(line: str) -> Iterable[str]:
    """The value of each op_name="..." in one line of HLO."""
    for part in line.split('op_name="')[1:]:
        yield part.split('"', 1)[0]


def _launches_by_scope(analysis: Analysis) -> dict[Key, tuple[Launch, ...]]:
    groups: dict[Key, tuple[Launch, ...]] = {}
    for launch in analysis.launches:
        key = (launch.scope, launch.phase)
        groups[key] = (*groups.get(key, ()), launch)
    return groups


def _guests_by_scope(analysis: Analysis) -> dict[Key, tuple[Launch, ...]]:
    groups: dict[Key, tuple[Launch, ...]] = {}
    for launch in analysis.launches:
        for key in scopes_within(launch)[1:]:
            groups[key] = (*groups.get(key, ()), launch)
    return groups


def _cell(strategy: str, own: tuple[Launch, ...], guests: tuple[Launch, ...]) -> ScopeCell:
    return ScopeCell(
        strategy=strategy,
        launches=tuple(launch.index for launch in own),
        bytes=sum((launch.bytes_read + launch.bytes_written) * launch.repeat for launch in own),
        roofline_us=sum(launch.roofline_us * launch.repeat for launch in own),
        fused_into=tuple(launch.index for launch in guests),
    )


def _program_order(
    own: dict[str, dict[Key, tuple[Launch, ...]]],
    guests: dict[str, dict[Key, tuple[Launch, ...]]],
    analyses: dict[str, Analysis],
) -> list[Key]:
    """All keys in the order of first launch, merged over strategies; the one with most scopes leads."""
    order: list[Key] = []
    for name in sorted(analyses, key=lambda name: -len(own[name])):
        position = 0
        for key in own[name]:
            if key in order:
                position = max(position, order.index(key) + 1)
            else:
                order.insert(position, key)
                position += 1
    for name in analyses:
        for key, launches in guests[name].items():
            if key not in order:
                host = (launches[0].scope, launches[0].phase)
                order.insert(order.index(host), key)
    return order
