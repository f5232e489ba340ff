"""Exposed time of asynchronous collectives: what the launches between start and done do not hide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hlo_analysis.program.facts import LaunchRow


def with_exposed(launches: Sequence[LaunchRow], waits: Mapping[int, int]) -> tuple[LaunchRow, ...]:
    """Adds `Launch.exposed_us` to collectives, whose need is then the time that other work hides.

    Two streams run the launches in order: asynchronous collectives one after the other, all else beside them until it
    waits.

    Args:
        launches: in launch order.
        waits: index of an asynchronous launch → how many launches precede the wait for it.
    """
    made = list(launches)
    computed = sent = 0.0
    pending: dict[int, float] = {}
    for place in range(len(launches) + 1):
        for index in [index for index in pending if waits[index] <= place]:
            exposed = max(0.0, pending.pop(index) - computed)
            computed += exposed
            hidden = max(0.0, launches[index].estimated_us - exposed)
            made[index] = replace(made[index], exposed_us=exposed, needed_us=hidden)
        if place == len(launches):
            break
        launch = launches[place]
        if launch.kind == "collective" and place in waits:
            sent = pending[place] = max(sent, computed) + launch.estimated_us
            continue
        computed += launch.estimated_us
        if launch.kind == "collective":
            made[place] = replace(launch, exposed_us=launch.estimated_us, needed_us=0.0)
    return tuple(made)
