"""Missed fusions: values that need not reach HBM, ranked by the time that remains when those above are done.

A fusion pays if the value is large compared with the work around it (the fusion test). So the bytes at stake are
divided by the traffic of the launches on both ends (`share`). Time counts only where a launch waits for memory: a
matrix product that arithmetic bounds runs no faster if it reads less. What XLA multiplies by zeros counts, too, where
it makes one dense product of a grouped one.

Kinds of missed fusion, by module:

- `producer_consumer.py`: one launch writes what another reads, directly or after a third has updated a part of it in
  place; or writes what a loop then overwrites.
- `shared_reads.py`: several launches read one input that a single launch could read once.
- `layout_roundtrip.py`: an array is transposed whole, which a loop reads or writes in slices.
- `kept_values.py`: the forward pass writes what the backward pass could compute again.
- `odd_sizes.py`: products of sizes that no library's kernel takes: they move no byte more, but take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hlo_analysis.decisions import categories
from hlo_analysis.missed.cost import Candidate, in_order
from hlo_analysis.missed.kept_values import kept_for_gradients
from hlo_analysis.missed.layout_roundtrip import transposed_for_loops
from hlo_analysis.missed.odd_sizes import odd_sizes
from hlo_analysis.missed.producer_consumer import between_launches, filled_for_loops, through_updates
from hlo_analysis.missed.program import Program
from hlo_analysis.missed.shared_reads import read_again, read_at_once
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import MissedFusion
from hlo_analysis.rules import gather

__all__ = ["Program", "rank"]

_RULES: tuple[Callable[[Program], Iterator[Candidate]], ...] = (
    between_launches,
    through_updates,
    filled_for_loops,
    read_at_once,
    read_again,
    transposed_for_loops,
    kept_for_gradients,
    odd_sizes,
)
"""The rules that find missed fusions."""

# Below this share of the bytes and of the time around it, a value fails the fusion test.
_SMALLEST_SHARE = 0.05


def rank(program: Program) -> tuple[MissedFusion, ...]:
    """Ranks the missed fusions: first the one that saves most, then the one that saves most of what remains, and so on.

    Of a value that must be written anyway only the reads are at stake: an output of the program, what the forward pass
    keeps for the backward pass, or a buffer that its reader updates in place. Attention scores need not be kept, since
    a fused kernel computes them again. The rules know what XLA:GPU fuses and what helps there: of a program for a CPU
    they say nothing.
    """
    launches, device = program.launches, program.device
    if device.is_cpu:
        return ()
    missed = [one for rule in _RULES for one in gather(rule, program) if _passes(one, launches)]
    return tuple(
        replace(one.found, rank=position, remaining_us=remaining)
        for position, (one, remaining) in enumerate(in_order(missed, launches, device), start=1)
    )


def _passes(candidate: Candidate, launches: Sequence[LaunchRow]) -> bool:
    """The fusion test of the whole value, on bytes or, for a pair of small launches, on time."""
    found, smallest = candidate.found, _SMALLEST_SHARE * candidate.portion
    ends = [launches[index] for index in {found.producer, *found.consumers}]
    around = sum(launch.roofline_us * launch.repeat for launch in ends)
    saves_time = found.category != categories.SHARED_INPUT and found.time_at_stake_us >= smallest * around
    is_large = found.bytes_at_stake > 0 and found.share >= smallest
    return is_large or (saves_time and (found.bytes_at_stake > 0 or candidate.slow_us > 0))
