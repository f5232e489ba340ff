"""Groups launches by scope and pass, similar layers as one, the longest first."""

from __future__ import annotations

from dataclasses import dataclass

from hlo_analysis.records import Analysis, Launch
from hlo_analysis.report.similar_layers import without_layer_numbers


@dataclass(frozen=True, kw_only=True)
class TimeGroup:
    """Launches of one scope and pass."""

    name: str
    """The scope, '*' for the number of the layer; else the source line. '↩' marks the backward pass."""
    launches: tuple[Launch, ...]
    scopes: int
    """How many scopes are folded into it."""

    @property
    def time_us(self) -> float:
        """Returns the time of one run: measured where known, else estimated."""
        return sum(launch.run_us for launch in self.launches)

    @property
    def count(self) -> int:
        """Returns the launches of one run."""
        return sum(launch.repeat for launch in self.launches)


def time_groups(analysis: Analysis) -> tuple[TimeGroup, ...]:
    """Returns all launches in groups, the longest group first."""
    groups: dict[str, list[Launch]] = {}
    for launch in analysis.launches:
        name = without_layer_numbers(launch.group) or "no scope"
        groups.setdefault(f"{name} ↩" if launch.phase == "backward" else name, []).append(launch)
    made = [
        TimeGroup(name=name, launches=tuple(found), scopes=len({launch.scope for launch in found}))
        for name, found in groups.items()
    ]
    return tuple(sorted(made, key=lambda group: -group.time_us))
