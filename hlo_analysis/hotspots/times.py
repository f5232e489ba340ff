"""Adds the times of a program's launches to its hotspots: measured where a GPU ran it, else estimated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import sqrt

from hlo_analysis.records import Hotspot, Launch, MissedFusion


def timed(
    hotspots: Iterable[Hotspot], launches: Sequence[Launch], missed: Sequence[MissedFusion]
) -> tuple[Hotspot, ...]:
    """Returns the hotspots with their times, those furthest above their need first."""
    made = [_timed(each, launches, missed) for each in hotspots]
    return tuple(sorted(made, key=lambda each: (-each.excess_us, -each.time_us, each.launches, each.missed)))


def launches_of(hotspot: Hotspot, missed: Sequence[MissedFusion]) -> tuple[int, ...]:
    """Returns the launches of a hotspot and those on both ends of its missed fusions, in launch order."""
    by_rank = {item.rank: item for item in missed} if hotspot.missed else {}
    items = [by_rank[rank] for rank in hotspot.missed if rank in by_rank]
    return tuple(sorted({*hotspot.launches, *(index for item in items for index in (item.producer, *item.consumers))}))


def _timed(hotspot: Hotspot, launches: Sequence[Launch], missed: Sequence[MissedFusion]) -> Hotspot:
    concerned = [launches[index] for index in launches_of(hotspot, missed)]
    # A profile cannot tell library calls in a row apart: theirs are estimated still.
    measured = sum(launch.run_us for launch in concerned if launch.measured_us is not None)
    is_measured = 2 * measured > sum(launch.run_us for launch in concerned)
    own = sum(launches[index].run_us for index in hotspot.launches)
    others = sum(launch.run_us for launch in concerned) - own
    if hotspot.most_us is not None and not is_measured:
        own = sqrt(own * max(own, hotspot.most_us))
    excess = max(own - hotspot.needed_us, 0.0) + hotspot.stake_us
    return replace(
        hotspot,
        time_us=own + others,
        excess_us=min(excess, own + others),
        how="measured" if is_measured else "estimated",
    )
