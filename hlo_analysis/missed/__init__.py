"""Missed fusions: values that need not reach HBM, ranked by the time that they cost.

*The fusion test*: a fusion pays when the intermediate is large against the work around it. So the bytes at stake are
set against the traffic of the launches on both ends (`share`), and time counts only where a launch waits for memory: a
matrix product that is bound by arithmetic runs no faster for reading less.

Six kinds are found. *Vertical*: a launch writes what another reads. *Through an update*: what it writes is read when
a third has updated a part of it in place. *Filled for a loop*: what it writes is overwritten by all runs of a loop.
*Horizontal*: several launches read one input that a single launch could read once. *Read again*: an argument is read
for a sum over its rows, and again with the sum. *Turned*: an argument is transposed whole, to be updated in part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hlo_analysis.catalogue import Catalogue
from hlo_analysis.decisions import categories
from hlo_analysis.missed.layout_roundtrip import find_turned, turned_for_updates
from hlo_analysis.missed.producer_consumer import between_launches, filled_for_loops, through_updates
from hlo_analysis.missed.shared_reads import read_again, read_at_once
from hlo_analysis.patterns.attention_scores import attention_scores
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Decision, Device, Intermediate, MissedFusion

# Below this share of the bytes and of the time around it, a value fails the fusion test.
_SMALLEST_SHARE = 0.05


def rank(
    launches: Sequence[LaunchRow],
    intermediates: Sequence[Intermediate],
    decisions: Sequence[Decision],
    device: Device,
    *,
    outputs: Collection[str] = (),
    donated: Collection[str] = (),
    catalogue: Catalogue = (),
) -> tuple[MissedFusion, ...]:
    """The missed fusions, costliest first.

    A value that must exist anyway is at stake only as far as it is read again: an output of the program, or what the
    forward pass keeps for the backward pass. Attention scores are never such a value: a fused kernel recomputes them.
    So is a buffer that its reader updates in place: what it does not replace is in the result.

    Args:
        launches: the launch table.
        intermediates: values that one launch hands another.
        decisions: from `decisions.decide`, for the reasons.
        device: bandwidth and launch overhead.
        outputs: names of values (as in `Intermediate.name`) that the program returns.
        donated: names of the arguments whose buffers the program may overwrite.
        catalogue: kernels that remedies may name.
    """
    scores = attention_scores(launches, intermediates)
    turned = find_turned(launches, intermediates)
    without = {move.index for found in turned for move in found.moves}
    missed = [
        *between_launches(
            launches, intermediates, decisions, device, scores, frozenset(outputs), frozenset(donated), catalogue
        ),
        *through_updates(launches, intermediates, device, frozenset(outputs)),
        *filled_for_loops(launches, intermediates, device),
        *read_at_once(launches, intermediates, device, scores),
        *read_again(launches, device, catalogue),
    ]
    missed = [found for found in missed if found.producer not in without]  # what would not be there
    missed += turned_for_updates(turned, device, donated)
    missed = [found for found in missed if _passes(found, launches)]
    missed.sort(key=lambda found: (-found.time_at_stake_us, -found.bytes_at_stake, found.producer, found.value))
    return tuple(replace(found, rank=position) for position, found in enumerate(missed, start=1))


def _passes(found: MissedFusion, launches: Sequence[LaunchRow]) -> bool:
    """The fusion test, on bytes or, for a pair of small launches, on time."""
    ends = [launches[index] for index in {found.producer, *found.consumers}]
    around = sum(launch.roofline_us * launch.repeat for launch in ends)
    saves_time = found.category != categories.SHARED_INPUT and found.time_at_stake_us >= _SMALLEST_SHARE * around
    return found.bytes_at_stake > 0 and (found.share >= _SMALLEST_SHARE or saves_time)
