"""Holds what the rules for missed fusions read of a program."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from hlo_analysis.catalogue import Catalogue
from hlo_analysis.patterns.attention_scores import attention_scores
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Decision, Device, Intermediate
from hlo_analysis.remedies import Table
from hlo_analysis.rules import attempt


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program's launches and values, as the rules for missed fusions read them.

    launches: the launch table.
    intermediates: values that one launch writes and another reads.
    decisions: why XLA left launches apart.
    device: bandwidth and launch overhead.
    outputs: names of values (as in `Intermediate.name`) that the program returns.
    donated: names of the arguments whose buffers the program may overwrite.
    catalogue: kernels that remedies may name.
    """

    launches: Sequence[LaunchRow]
    intermediates: Sequence[Intermediate]
    decisions: Sequence[Decision]
    device: Device
    outputs: Collection[str] = ()
    donated: Collection[str] = ()
    catalogue: Catalogue = ()

    @cached_property
    def scores(self) -> frozenset[str]:
        """Returns the names of the values that are attention scores, or are made from them."""
        return attempt(attention_scores, frozenset(), self.launches, self.intermediates)

    @cached_property
    def table(self) -> Table:
        """Returns the launches with the producers and readers of each."""
        return Table(self.launches)
