"""Compares strategies, with their launches aligned by the model's named scopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from hlo_analysis.records import Analysis, Comparison, Launch, Phase, ScopeCell, ScopeRow, StrategyResult

Key = tuple[str, Phase]


def compare_analyses(
    title: str, results: Sequence[StrategyResult], baseline: str, *, unfused: str | None = None
) -> Comparison:
    """Aligns the strategies' launches by (scope, phase), in program order; those without a scope by source line.

    A launch counts in its own scope. Its fused instructions may also belong to another scope (a residual add inside a
    norm, say). That scope's cell then names the launch in `fused_into` and counts no bytes for it.

    Args:
        title: what is compared, for people.
        results: one entry per strategy; those without an analysis take no part in the rows.
        baseline: the strategy that differences are taken against.
        unfused: the strategy that fuses nothing, against which savings are counted if it has an analysis.

    Raises:
        ValueError: `baseline` is not in `results`, or two results have one name.
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
        for scope, phase in _program_order(own, guests)
    )
    return Comparison(
        title=title,
        baseline=baseline,
        strategies=tuple(results),
        rows=rows,
        unfused=unfused if unfused in analyses else None,
    )


def _launches_by_scope(analysis: Analysis) -> dict[Key, tuple[Launch, ...]]:
    groups: dict[Key, tuple[Launch, ...]] = {}
    for launch in analysis.launches:
        key = (launch.group, launch.phase)
        groups[key] = (*groups.get(key, ()), launch)
    return groups


def _guests_by_scope(analysis: Analysis) -> dict[Key, tuple[Launch, ...]]:
    groups: dict[Key, tuple[Launch, ...]] = {}
    for launch in analysis.launches:
        for key in launch.scopes:
            if key != (launch.scope, launch.phase):
                groups[key] = (*groups.get(key, ()), launch)
    return groups


def _cell(strategy: str, own: tuple[Launch, ...], guests: tuple[Launch, ...]) -> ScopeCell:
    return ScopeCell(
        strategy=strategy,
        launches=tuple(launch.index for launch in own),
        bytes=sum(launch.bytes_moved * launch.repeat for launch in own),
        roofline_us=sum(launch.roofline_us * launch.repeat for launch in own),
        fused_into=tuple(launch.index for launch in guests),
    )


def _program_order(
    own: Mapping[str, Mapping[Key, tuple[Launch, ...]]],
    guests: Mapping[str, Mapping[Key, tuple[Launch, ...]]],
) -> list[Key]:
    """Orders all keys by the median of their launches, merged over strategies; the one with most scopes leads.

    The median, unlike the first launch, keeps a scope in place if a mask or table of it is made early. Launches with
    neither scope nor source line come last.
    """
    order: list[Key] = []
    for name in sorted(own, key=lambda name: -len(own[name])):
        position = 0
        for key in sorted(own[name], key=lambda key: median(launch.index for launch in own[name][key])):
            if key in order:
                position = max(position, order.index(key) + 1)
            else:
                order.insert(position, key)
                position += 1
    for groups in guests.values():
        for key, launches in groups.items():
            if key not in order:
                order.insert(_guest_position(key, launches[0], order), key)
    return sorted(order, key=lambda key: not key[0])


def _guest_position(key: Key, host: Launch, order: list[Key]) -> int:
    """Returns the position before or after the host launch's row, in the order of the scopes in the launch."""
    inside = host.scopes
    is_after = inside.index(key) > inside.index((host.scope, host.phase))
    return order.index((host.group, host.phase)) + is_after
