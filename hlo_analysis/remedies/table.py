"""The launch table, with the readers of each value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hlo_analysis.patterns.launch_patterns import is_product
from hlo_analysis.program.facts import LaunchRow

SUMS = 8
"""What launches hand on as sums over rows is at most this part of what they read."""

# Launches from a sum to what is made with it, at most: finished in two steps, divided, and its root taken.
_FAR = 5


@dataclass(frozen=True)
class Table:
    """The launch table, and who reads what: found once for all of its missed fusions."""

    launches: Sequence[LaunchRow]

    @cached_property
    def readers(self) -> Mapping[int, Sequence[LaunchRow]]:
        """By index of a launch those that read what it writes."""
        found: dict[int, list[LaunchRow]] = defaultdict(list)
        for launch in self.launches:
            for producer in {value.producer for value in launch.inputs if value.producer is not None}:
                found[producer].append(launch)
        return found

    @cached_property
    def has_backward(self) -> bool:
        """Whether the program takes a gradient."""
        return any(launch.phase == "backward" for launch in self.launches)

    def makers(self, launch: LaunchRow, largest: float = float("inf")) -> list[LaunchRow]:
        """The launches that make its inputs of at most so many bytes."""
        indices = {value.producer for value in launch.inputs if value.producer is not None and value.bytes <= largest}
        return [self.launches[index] for index in sorted(indices)]

    def with_sums(self, ends: Sequence[LaunchRow], near: Sequence[LaunchRow]) -> list[LaunchRow]:
        """The ends, and those that finish what `near` of them read as sums over rows."""
        largest = max(launch.bytes_read for launch in ends) / SUMS
        found, new = {launch.index: launch for launch in ends}, list(near)
        for _ in range(_FAR):
            new = [maker for launch in new for maker in self.makers(launch, largest)]
            new = [maker for maker in new if maker.index not in found]
            # A copy counts indices; a product puts together other sums than those of its reader's rows.
            new = [maker for maker in new if maker.kind != "copy" and not is_product(maker)]
            found |= {launch.index: launch for launch in new}
        return list(found.values())
