"""Finds where a program's time goes: launches above what they need, by cause, fusion or not.

- `causes.py`: the rules that say why a launch takes longer than its bytes and its matrix products need
- `remedies.py`: what to do about each
- `times.py`: the time of each hotspot, measured where a GPU ran the program

A launch counts for one cause: that of the first rule that knows it; else a missed fusion at one of its ends that a
kernel takes; else the kind of its work. What a missed fusion has at stake is traffic, and counts beside that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from hlo_analysis.catalogue import PATTERNS, Catalogue
from hlo_analysis.decisions.categories import ODD_SIZE
from hlo_analysis.decisions.explanations import plain_reason
from hlo_analysis.hotspots.causes import RULES, Cause, kind_of_work
from hlo_analysis.hotspots.times import timed
from hlo_analysis.patterns.launch_patterns import is_batched
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Device, Hotspot, MissedFusion
from hlo_analysis.rules import attempt

__all__ = ["find_hotspots", "timed"]

_LAYER = re.compile(r"_?\d+")


@dataclass(kw_only=True)
class _Group:
    """A hotspot in the making: each launch with its cause, and the missed fusions."""

    launches: list[tuple[LaunchRow, Cause]] = field(default_factory=list)
    missed: list[MissedFusion] = field(default_factory=list)


def find_hotspots(
    launches: Sequence[LaunchRow], missed: Sequence[MissedFusion], device: Device, catalogue: Catalogue = ()
) -> tuple[Hotspot, ...]:
    """Groups all launches and missed fusions of a program by the cause of the time that they take above their need.

    Of a program for a CPU it says nothing.
    """
    if device.is_cpu:
        return ()
    groups: defaultdict[Hashable, _Group] = defaultdict(_Group)
    taken: dict[int, Hashable] = {}
    for launch in launches:
        if cause := next(_causes(launch, launches, device), None):
            key = cause.key or (cause.text, launch.source, _place(launch.scope))
            groups[key].launches.append((launch, cause))
            taken[launch.index] = key if cause.takes_all else None

    def take_odd_sizes(*, batched: bool) -> None:
        for item in missed if ODD_SIZE in {item.category for item in missed} else ():
            found = [launches[index] for index in item.consumers if item.category == ODD_SIZE and index not in taken]
            found = [launch for launch in found if batched or not is_batched(launch)]
            cause = Cause(text=item.reason.strip("[]"))
            if found:
                groups[item.remedy, _place(item.scope)].launches += [(launch, cause) for launch in found]
            taken.update(dict.fromkeys(launch.index for launch in found))

    take_odd_sizes(batched=False)
    for item in missed:
        ends = (item.producer, *item.consumers)
        inside = {taken.get(index) for index in ends}
        key = next(iter(inside)) if len(inside) == 1 else None
        key = key or (item.remedy, _place(item.scope))
        groups[key].missed.append(item)
        if item.remedy_kind == "kernel" and (item.kernel or item.code):
            fresh = [index for index in ends if index not in taken]
            groups[key].launches += [(launches[index], Cause(text="")) for index in fresh]
            taken |= dict.fromkeys(fresh)
    take_odd_sizes(batched=True)  # those that no kernel of attention takes
    for launch in launches:
        if launch.index not in taken:
            cause = Cause(text=kind_of_work(launch))
            key = (cause.text, launch.source, _place(launch.scope), launch.phase)
            groups[key].launches.append((launch, cause))
    made = [_hotspot(each, launches, catalogue) for each in groups.values() if each.launches or each.missed]
    return timed(made, launches, missed)


def _causes(launch: LaunchRow, launches: Sequence[LaunchRow], device: Device) -> Iterator[Cause]:
    for rule in RULES:
        if (found := attempt(rule, None, launch, launches, device)) is not None:
            yield found


def _place(scope: str) -> str:
    """Returns a scope without the numbers of layers, so that equal layers are one group."""
    return _LAYER.sub("", scope)


def _hotspot(group: _Group, launches: Sequence[LaunchRow], catalogue: Catalogue) -> Hotspot:
    causes = [cause for _, cause in group.launches]
    own = next((cause for cause in causes if cause.text), None)
    first = group.missed[0] if group.missed else None
    found = [launch for launch, _ in group.launches]
    text = own.text if own else _traffic(group.missed, launches)
    remedy = own.remedy.named(catalogue, found) if own and own.remedy else None
    advice = remedy or first
    return Hotspot(
        launches=tuple(sorted(launch.index for launch in found)),
        missed=tuple(item.rank for item in group.missed),
        cause=text[0].upper() + text[1:],
        needed_us=sum(_needed_us(*each) * each[0].repeat for each in group.launches),
        # What an odd size has at stake is the time of its products, above their need.
        stake_us=0.0
        if own and own.takes_all
        else sum(item.remaining_us for item in group.missed if item.category != ODD_SIZE),
        waits_for_host=bool(own and own.waits),
        most_us=sum(cause.most_us or 0.0 for cause in causes) or None,
        scope=_scope([each.scope for each in (*group.missed, *found) if each.scope]),
        source=next((each.source for each in (*group.missed, *found) if each.source), None),
        remedy_kind=remedy.kind if remedy else first.remedy_kind if first else "",
        remedy=remedy.text if remedy else first.remedy if first else "",
        options=advice.options if advice else (),
        kernel=advice.kernel if advice else None,
        code=advice.code if advice else "",
    )


def _scope(scopes: Sequence[str]) -> str:
    """Returns the first scope, with '*' for the numbers that differ in the others."""
    if not scopes:
        return ""
    first, *others = [re.split(r"(\d+)", scope) for scope in dict.fromkeys(scopes)]
    alike = [other for other in others if other[::2] == first[::2]]
    return "".join("*" if any(other[at] != part for other in alike) else part for at, part in enumerate(first))


def _needed_us(launch: LaunchRow, cause: Cause) -> float:
    return launch.needed_us if cause.needed_us is None else cause.needed_us


def _traffic(missed: Sequence[MissedFusion], launches: Sequence[LaunchRow]) -> str:
    """Says what goes through memory, and why XLA left it so."""
    first = missed[0]
    count = "a value goes" if len(missed) == 1 else f"{len(missed)} values go"
    why = plain_reason(first.category, launches[first.producer], launches[first.consumers[0]])
    where = "them" if first.kernel in PATTERNS else "launches"
    parts = f"{PATTERNS[first.kernel]}, in several launches: " if first.kernel in PATTERNS else ""
    return f"{parts}{count} through memory between {where}. {why}"
