"""Finds values that several launches read where one launch could read them once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from hlo_analysis.decisions import categories
from hlo_analysis.missed.cost import Candidate, missed, read_by_each
from hlo_analysis.missed.program import Program
from hlo_analysis.patterns.launch_patterns import PRODUCTS
from hlo_analysis.patterns.redundant_reads import find_ancestors, find_rereads
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Value
from hlo_analysis.remedies import rows_remedy, shared_input_remedy

_MERGEABLE = PRODUCTS | {"loop", "reduction", "transpose", "concatenate", "triton", "copy"}


def read_at_once(program: Program) -> Iterator[Candidate]:
    """Launches that depend on one another in no way and read the same values."""
    launches = program.launches
    readers: dict[str, list[LaunchRow]] = defaultdict(list)
    values: dict[str, Value] = {}
    for launch in launches:
        for value in launch.inputs:
            readers[value.name].append(launch)
            values[value.name] = value
    handed = {value.name: read_by_each(value, launches) for value in program.intermediates}
    ancestors = find_ancestors(launches)
    groups: dict[tuple[int, ...], dict[str, int]] = defaultdict(dict)
    for name, found in readers.items():
        for group in _siblings(found, ancestors):
            once = values[name].bytes * group[0].repeat
            least = min(once, *(launch.bytes_read * launch.repeat for launch in group))
            read = [handed[name][launch.index] if name in handed else least for launch in group]
            again = sum(read) - once  # nothing where each reads a slice of its own
            if again > 0:
                groups[tuple(launch.index for launch in group)][name] = again
    for indices, shared in groups.items():
        group = [launches[index] for index in indices]
        _, name = max((count, name) for name, count in shared.items())
        remedy = shared_input_remedy(group)
        if remedy is None or name in program.scores:
            continue
        largest, stake = values[name], sum(shared.values())
        what = f"{name} and {len(shared) - 1} more" if len(shared) > 1 else name
        yield missed(
            program.device,
            largest,
            producer=indices[0] if largest.producer is None else largest.producer,
            consumers=indices,
            saved={launch.index: stake / len(group[1:]) for launch in group[1:]},
            removed=group[1:],
            ends=group,
            reason=f"[{len(group)} launches each read {what} anew]",
            category=categories.SHARED_INPUT,
            remedy=remedy.named((), group),
        )


def read_again(program: Program) -> Iterator[Candidate]:
    """Yields arguments of which one kernel could read each row once, with its sum and with what needs the sum."""
    for found in find_rereads(program.launches):
        first, *later = found.readers
        ends = [*found.readers, *found.between]
        yield missed(
            program.device,
            found.value,
            producer=first.index,
            consumers=tuple(launch.index for launch in found.readers),
            saved={launch.index: found.value.bytes * first.repeat for launch in later},
            removed=[*later, *found.between],
            ends=ends,
            reason=f"[{len(found.readers)} launches read {found.value.name}, the later ones after sums over its rows]",
            category=categories.SHARED_INPUT,
            remedy=rows_remedy(program.table, ends).named(program.catalogue, ends),
        )


def _siblings(readers: Sequence[LaunchRow], ancestors: Sequence[int]) -> list[list[LaunchRow]]:
    """Groups of two and more readers that could be one launch: alike, in one pass, none needing another's result."""
    alike: Mapping[tuple, list[LaunchRow]] = defaultdict(list)
    for launch in {reader.index: reader for reader in readers}.values():
        if launch.kind in _MERGEABLE:
            alike[launch.computation, launch.phase, launch.kind in PRODUCTS, launch.repeat].append(launch)
    groups: list[list[LaunchRow]] = []
    for candidates in alike.values():
        group: list[LaunchRow] = []
        for launch in candidates:
            if not any(ancestors[launch.index] >> member.index & 1 for member in group):
                group.append(launch)
        if len(group) > 1:
            groups.append(group)
    return groups
