"""Compares two analyses: launches merged, split, gained and lost, matched by the work that they do.

`hlo_analysis.matching` matches the launches. Names do not help: they change with every compilation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hlo_analysis.budget import differences_in_making, lock_of
from hlo_analysis.diff import compare_analyses
from hlo_analysis.matching import matched
from hlo_analysis.records import Analysis, Launch, Phase, ScopeCell, StrategyResult

Kind = Literal["merged", "split", "regrouped", "gained", "lost", "changed"]
"""The kind of a change.

merged: several launches became one. split: one became several. regrouped: several became several others.
gained, lost: no launch of the other side computes their work.
changed: the same work, with other traffic or another kind of kernel.
"""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Launches whose work is in other launches on the other side."""

    kind: Kind
    before: tuple[int, ...]
    after: tuple[int, ...]
    """Indices in `launches` of each side."""
    bytes_before: int
    bytes_after: int
    """Counted: HBM traffic of one run."""


@dataclass(frozen=True, kw_only=True)
class ScopeDifference:
    """Launches and HBM traffic of one scope on both sides, counted for one run."""

    scope: str
    phase: Phase
    launches_before: int
    launches_after: int
    bytes_before: int
    bytes_after: int

    @property
    def is_equal(self) -> bool:
        """Whether both sides are equal."""
        return (self.launches_before, self.bytes_before) == (self.launches_after, self.bytes_after)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The changes of a program's launches between two analyses."""

    before: Analysis
    after: Analysis
    changes: tuple[Change, ...]
    """Changes in program order, without launches that are the same on both sides."""
    scopes: tuple[ScopeDifference, ...]
    """All scopes, in program order."""
    notes: tuple[str, ...] = ()
    """Differences in how the two were made: target, mode, options, versions."""

    @property
    def is_worse(self) -> bool:
        """Whether the second makes more launches, moves more bytes, or takes 0.1 % more time by the estimate."""
        before, after = self.before, self.after
        return (
            after.launch_count > before.launch_count
            or after.traffic.bytes > before.traffic.bytes
            or after.estimated_us > 1.001 * before.estimated_us
        )


def difference(before: Analysis, after: Analysis) -> Difference:
    """Compares two analyses of one program, or of two versions of it. Pure."""
    changes = [
        Change(
            kind=kind,
            before=old,
            after=new,
            bytes_before=_bytes(before.launches, old),
            bytes_after=_bytes(after.launches, new),
        )
        for old, new in matched(before.launches, after.launches)
        if (kind := _kind(before.launches, after.launches, old, new)) is not None
    ]
    return Difference(
        before=before,
        after=after,
        changes=tuple(changes),
        scopes=_scopes(before, after),
        notes=tuple(differences_in_making(lock_of(before), lock_of(after))),
    )


def _kind(before: Sequence[Launch], after: Sequence[Launch], old: Sequence[int], new: Sequence[int]) -> Kind | None:
    match len(old), len(new):
        case 0, _:
            return "gained"
        case _, 0:
            return "lost"
        case 1, 1:
            one, other = before[old[0]], after[new[0]]
            return "changed" if _facts(one) != _facts(other) else None
        case _, 1:
            return "merged"
        case 1, _:
            return "split"
        case _:
            return "regrouped"


def _facts(launch: Launch) -> tuple[object, ...]:
    return launch.kind, launch.repeat, launch.bytes_read, launch.bytes_written


def _bytes(launches: Sequence[Launch], indices: Iterable[int]) -> int:
    return sum(launches[i].bytes_moved * launches[i].repeat for i in indices)


def _scopes(before: Analysis, after: Analysis) -> tuple[ScopeDifference, ...]:
    sides = [
        StrategyResult(name=name, description="", analysis=analysis)
        for name, analysis in (("before", before), ("after", after))
    ]
    rows = compare_analyses("", sides, "before").rows
    return tuple(
        ScopeDifference(
            scope=row.scope,
            phase=row.phase,
            launches_before=_count(before, row.cells[0]),
            launches_after=_count(after, row.cells[1]),
            bytes_before=row.cells[0].bytes,
            bytes_after=row.cells[1].bytes,
        )
        for row in rows
    )


def _count(analysis: Analysis, cell: ScopeCell) -> int:
    return sum(analysis.launches[index].repeat for index in cell.launches)
