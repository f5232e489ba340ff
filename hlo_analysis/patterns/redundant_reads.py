"""Finds arguments that are read again after row sums: a normalization or a softmax in several launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hlo_analysis.patterns.attention_scores import elements, last_size
from hlo_analysis.patterns.launch_patterns import has, is_product, sums_columns
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Value

_KINDS = frozenset({"loop", "reduction", "transpose", "triton"})

# A kernel that reads a row once keeps it on the chip: so much shared memory a block has on Hopper and Blackwell.
_LARGEST_ROW = 227 << 10
_SECTOR = 32
"""Bytes that HBM hands out together."""

_SMALLEST_RATIO = 8
"""Launches pass on sums, not another array, if it is at least so many times smaller than the argument."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reread:
    """An argument, the launches that read all of it, and those between them that finish the sums."""

    value: Value
    readers: tuple[LaunchRow, ...]
    between: tuple[LaunchRow, ...]


def find_ancestors(launches: Sequence[LaunchRow]) -> list[int]:
    """Returns for each launch those that it depends on, as bits of an integer."""
    ancestors: list[int] = []
    for launch in launches:
        needed = {*launch.producers}
        if launch.index and _continues(launches[launch.index - 1], launch):
            needed.add(launch.index - 1)
        bits = 0
        for index in needed:
            if index < launch.index:
                bits |= ancestors[index] | (1 << index)
        ancestors.append(bits)
    return ancestors


def _continues(last: LaunchRow, launch: LaunchRow) -> bool:
    """Whether two launches are passes of one instruction, as of a sort: what they hand on is named after it."""
    return (last.name, last.computation) == (launch.name, launch.computation)


def find_rereads(launches: Sequence[LaunchRow]) -> Iterator[Reread]:
    """Yields arguments that one launch reduces to row sums and a later one reads again beside these sums."""
    ancestors = find_ancestors(launches)
    readers: dict[str, list[LaunchRow]] = defaultdict(list)
    values: dict[str, Value] = {}
    for launch in launches:
        for value in launch.inputs:
            if value.producer is None and launch.kind in _KINDS and launch.bytes_read >= value.bytes:
                readers[value.name].append(launch)
                values[value.name] = value
    for name, found in readers.items():
        first = next((launch for launch in found if has(launch, "reduce")), None)
        if first is None:
            continue
        group, between = [first], {}
        for launch in found:
            path = _path(launches, ancestors, first, launch)
            alike = (launch.computation, launch.phase) == (first.computation, first.phase)
            if path is None or not alike or _needs_others(launches, path, first, launch, name):
                continue
            if any(map(is_product, path)):  # which puts together the sums of all features
                continue
            if any(ancestors[launch.index] >> other.index & 1 for other in found if _crosses(first, other)):
                continue
            if _passes_only_sums(path, first, launch, values[name]):
                group.append(launch)
                between |= {inner.index: inner for inner in path}
        if len(group) > 1:
            rest = tuple(inner for index, inner in between.items() if inner not in group)
            yield Reread(value=values[name], readers=tuple(group), between=rest)


def _path(
    launches: Sequence[LaunchRow], ancestors: Sequence[int], first: LaunchRow, last: LaunchRow
) -> list[LaunchRow] | None:
    """The launches that need the first and that the last needs; None where it does not need the first."""
    if not ancestors[last.index] >> first.index & 1:
        return None
    return [
        launch
        for launch in launches[first.index + 1 : last.index]
        if ancestors[launch.index] >> first.index & 1 and ancestors[last.index] >> launch.index & 1
    ]


def _needs_others(
    launches: Sequence[LaunchRow], path: Sequence[LaunchRow], first: LaunchRow, last: LaunchRow, name: str
) -> bool:
    """Whether sums of other arrays are put together with those of this one, as in the norm of all gradients."""
    producers = {first.index, *(launch.index for launch in path)}
    others = [launches[index] for launch in (*path, last) for index in launch.producers if index not in producers]
    return any(has(other, "reduce") and all(value.name != name for value in other.inputs) for other in others)


def _crosses(first: LaunchRow, other: LaunchRow) -> bool:
    """Whether one of two launches sums rows and the other columns, so that no block has what both need."""
    return has(other, "reduce") and sums_columns(other) != sums_columns(first)


def _passes_only_sums(path: Sequence[LaunchRow], first: LaunchRow, last: LaunchRow, value: Value) -> bool:
    """Whether the launches from the first to the last pass on nothing but sums of rows, which fit on the chip."""
    producers = {first.index, *(launch.index for launch in path)}
    passed = [given for launch in (*path, last) for given in launch.inputs if given.producer in producers]
    sums = min(passed, key=elements)
    row = value.bytes / elements(sums)
    if last_size(sums) == last_size(value):  # sums over columns: as many at a time as memory hands out together
        row *= _SECTOR * elements(value) / value.bytes
    return row <= _LARGEST_ROW and all(given.bytes * _SMALLEST_RATIO <= value.bytes for given in passed)
