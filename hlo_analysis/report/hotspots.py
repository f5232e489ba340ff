"""Chooses the hotspots that a report lists, and says their times and launches in short texts."""

from __future__ import annotations

from hlo_analysis.hotspots.times import launches_of
from hlo_analysis.records import Analysis, Hotspot
from hlo_analysis.report.formats import format_us, plural

_LEAST_SHARE = 0.01
"""Of the program's time: smaller hotspots are in the JSON alone."""
_LEAST_US = 0.5
_MOST_NAMED = 3


def listed(analysis: Analysis) -> tuple[Hotspot, ...]:
    """Returns the hotspots with at least 1 % of the program's time above what is needed, and calls to the host."""
    least = max(_LEAST_SHARE * program_us(analysis), _LEAST_US)
    found = [each for each in analysis.hotspots if each.excess_us >= least or each.waits_for_host]
    return tuple(sorted(found, key=lambda each: not each.waits_for_host))


def program_us(analysis: Analysis) -> float:
    """Returns the time of all launches of one run, measured where known."""
    return sum(launch.run_us for launch in analysis.launches)


def time_text(hotspot: Hotspot) -> str:
    """Formats the time above the need and the whole, as '1.07 ms of 2.45 ms', or 'unknown' of a call to the host."""
    if hotspot.waits_for_host:
        return "unknown"
    most = "" if hotspot.most_us is None else f", {format_us(hotspot.most_us)} at worst"
    return f"{format_us(hotspot.excess_us)} of {format_us(hotspot.time_us)}{most}"


def launches_text(analysis: Analysis, hotspot: Hotspot) -> str:
    """Names the launches that take longest: '12 launches: #3 fusion.7 (triton), #9 fusion.8 (triton), …'."""
    found = [analysis.launches[index] for index in launches_of(hotspot, analysis.missed)]
    longest = sorted(found, key=lambda launch: -launch.run_us)[:_MOST_NAMED]
    named = ", ".join(f"#{each.index} {each.name} ({each.kind})" for each in longest)
    more = f", {len(found) - len(longest)} more" if len(found) > len(longest) else ""
    return f"{plural(sum(each.repeat for each in found), 'launch')}: {named}{more}"


def heading(analysis: Analysis, found: tuple[Hotspot, ...]) -> str:
    """Returns a sentence such as '2.9 ms of 10.2 ms are above what launches need'."""
    above = sum(each.excess_us for each in found)
    return f"{format_us(above)} of {format_us(program_us(analysis))} above what its launches need"
