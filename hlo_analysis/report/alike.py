"""Shows strategies under which XLA makes the same program as one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from hlo_analysis.records import Analysis, Comparison, StrategyResult
from hlo_analysis.report.formats import enumerated


def distinct(comparison: Comparison) -> Comparison:
    """Returns the comparison with one strategy for each program that XLA makes; its description names the others.

    Of equal ones the baseline stays, else the first; what savings are counted against has a row of its own.
    """
    kept = {first.name: _described(first, others) for first, others in _groups(comparison)}
    return replace(
        comparison,
        strategies=tuple(kept[each.name] for each in comparison.strategies if each.name in kept),
        rows=tuple(
            replace(row, cells=tuple(cell for cell in row.cells if cell.strategy in kept)) for row in comparison.rows
        ),
    )


def twin_sentences(comparison: Comparison) -> list[str]:
    """Returns 'xla_cublas and fused make the same program as xla.' for each program that several strategies make."""
    return [
        f"{enumerated(others)} {'make' if len(others) > 1 else 'makes'} the same program as {first.name}."
        for first, others in _groups(comparison)
        if others
    ]


def _groups(comparison: Comparison) -> list[tuple[StrategyResult, list[str]]]:
    """Returns the strategy shown for each program, and the names of the others that make it."""
    groups: dict[Hashable, list[StrategyResult]] = {}
    for result in comparison.strategies:
        analysis = None if result.name == comparison.unfused else result.analysis
        key = result.name if analysis is None else _program(analysis)
        groups.setdefault(key, []).append(result)
    first = [next((each for each in found if each.name == comparison.baseline), found[0]) for found in groups.values()]
    return [
        (one, [each.name for each in found if each is not one])
        for one, found in zip(first, groups.values(), strict=True)
    ]


def _described(result: StrategyResult, others: list[str]) -> StrategyResult:
    if not others:
        return result
    return replace(result, description=f"{result.description} The same program: {', '.join(others)}.".strip())


def _program(analysis: Analysis) -> Hashable:
    """Returns what tells programs apart: each launch's kind, work, sizes and kernel, and the peak of memory."""
    launches = tuple(
        (
            *(each.kind, each.repeat, each.opcodes, each.bytes_read, each.bytes_written, each.flops),
            *(each.grid, each.block, each.estimated_us, each.outputs and each.outputs[0].shape),
        )
        for each in analysis.launches
    )
    return analysis.device.name, launches, analysis.memory.peak_bytes
