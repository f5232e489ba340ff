"""Formats an exceeded limit and the launches responsible as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_analysis.budget import Excess
from hlo_analysis.records import Launch
from hlo_analysis.report.formats import format_bytes, plural

_OF_BYTES = {
    "HBM bytes": "of HBM traffic",
    "peak bytes": "of memory at the peak",
    "bytes to other GPUs": "sent to other GPUs",
}


def excess_text(excess: Excess) -> str:
    """Formats an excess as '5 launches, at most 3 (--max-launches)'."""
    if excess.quantity == "launches":
        return f"{plural(excess.found, 'launch')}, at most {excess.limit} ({excess.origin})"
    if excess.quantity == "all-gathers":
        return f"{plural(excess.found, 'all-gather')}, expected none ({excess.origin})"
    what = _OF_BYTES.get(excess.quantity, "")
    if excess.value is not None:
        what = f"between launches, {excess.value.name} {excess.value.shape}"
    return (
        f"{format_bytes(excess.found)} {what} ({excess.found:,} bytes), at most {format_bytes(excess.limit)} "
        f"({excess.limit:,}; {excess.origin})"
    )


_LISTED = 10
"""Most launches listed."""


def responsible_lines(found: Sequence[tuple[Launch, str]]) -> list[str]:
    """Returns a line for each of the first ten launches: name, place in the program, and why it is separate."""
    lines = [f"  {launch_line(launch)}: {reason}" for launch, reason in found[:_LISTED]]
    left_out = len(found) - len(lines)
    return [*lines, f"  and {plural(left_out, 'more launch')}"] if left_out else lines


def launch_line(launch: Launch) -> str:
    """Formats a launch as '#1 name (kind) at file.py:6 (scope), 3 times, 50.3 MB'."""
    at = f" at {launch.source}" if launch.source else ""
    scope = f" ({launch.scope})" if launch.scope else ""
    times = f", {launch.repeat} times" if launch.repeat > 1 else ""
    moved = format_bytes(launch.bytes_moved * launch.repeat)
    return f"#{launch.index} {launch.name} ({launch.kind}){at}{scope}{times}, {moved}"
