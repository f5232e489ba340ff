"""The launch table, with the producers and readers of each launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hlo_analysis.patterns.launch_patterns import computes_groups, is_product
from hlo_analysis.program.facts import LaunchRow

ROWS_PER_SUM = 8
"""Row sums have at most one byte for this many bytes of the rows."""

_MOST_STEPS = 5
"""The longest chain of launches from a row sum to its use: two finish the sum, others take the mean and its root."""


@dataclass(frozen=True)
class Table:
    """The launch table, with the producers and readers of each launch; built once for all missed fusions."""

    launches: Sequence[LaunchRow]

    @cached_property
    def readers(self) -> Mapping[int, Sequence[LaunchRow]]:
        """Returns the launches that read the results of each launch, by its index."""
        found: dict[int, list[LaunchRow]] = defaultdict(list)
        for launch in self.launches:
            for producer in launch.producers:
                found[producer].append(launch)
        return found

    @cached_property
    def expanded(self) -> frozenset[int]:
        """Returns the launches that XLA makes of grouped products (`lax.ragged_dot`).

        These are dense products over all groups, and the launches without a name that mask, transpose or pad for them.
        """
        found: set[int] = set()
        for launch in reversed(self.launches):
            readers = self.readers.get(launch.index, ())
            # An argument's name has no '/', and is that of a launch which only moves the argument.
            is_named = any("/" in name for name in (launch.op_name, *launch.facts.all_op_names))
            is_for_others = bool(readers) and all(reader.index in found for reader in readers)
            if computes_groups(launch) or (is_for_others and not is_named):
                found.add(launch.index)
        return frozenset(found)

    def producers(self, launch: LaunchRow, largest: float = float("inf")) -> list[LaunchRow]:
        """Returns the launches that write the inputs of a launch. largest: the most bytes of such an input."""
        indices = {value.producer for value in launch.inputs if value.producer is not None and value.bytes <= largest}
        return [self.launches[index] for index in sorted(indices)]

    def with_sums(self, ends: Sequence[LaunchRow], near: Sequence[LaunchRow]) -> list[LaunchRow]:
        """Returns `ends` and the launches that compute the row sums for the launches `near`."""
        largest = max(launch.bytes_read for launch in ends) / ROWS_PER_SUM
        found, new = {launch.index: launch for launch in ends}, list(near)
        for _ in range(_MOST_STEPS):
            new = [producer for launch in new for producer in self.producers(launch, largest)]
            new = [producer for producer in new if producer.index not in found]
            # A copy counts indices; a product puts together other sums than those of its reader's rows.
            new = [producer for producer in new if producer.kind != "copy" and not is_product(producer)]
            found |= {launch.index: launch for launch in new}
        return list(found.values())
