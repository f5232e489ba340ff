"""Chooses the remedy next to a launch that only moves data: casts, fills, sorts, slices, joins, transposes."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_analysis.patterns.launch_patterns import (
    LIBRARIES,
    broadcasts,
    changes_layout,
    convolves,
    fills,
    has,
    is_library_kernel,
    is_product,
    only_casts,
    only_moves,
    strides_by_two,
)
from hlo_analysis.patterns.pair_patterns import (
    knows_all_steps,
    numbers_updates,
    scatters_rows,
)
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.remedies import loop_texts, texts
from hlo_analysis.remedies.convolutions import filter_layout
from hlo_analysis.remedies.table import Table
from hlo_analysis.remedies.texts import Remedy

_OF_INDEX = 8
"""FLOPs of an index that is counted down, as in a backward pass, and kept within bounds: no more than these."""


def of_places(table: Table, producer: LaunchRow, readers: Sequence[LaunchRow], *, is_projected: bool) -> Remedy | None:
    """The remedy where one end changes no value, None where each does."""
    ends = (producer, *readers)
    if any(map(only_casts, ends)) and any(end.kind in LIBRARIES for end in ends):
        return texts.KEEP_TRITON
    if remedy := _of_scatters(table, producer, readers):
        return remedy
    # A copy whose index is counted down, as in a backward pass, has arithmetic inside.
    if producer.repeat > 1 and has(producer, "dynamic-slice") and (producer.kind == "copy" or only_moves(producer)):
        return _of_stack(producer, readers)
    if strides_by_two(producer) and any(map(strides_by_two, (*readers, *table.producers(producer)))):
        return texts.SCAN
    if is_projected:
        return texts.UNTRANSPOSED_ATTENTION
    stacks = [reader for reader in readers if _stacks(table, reader)]
    if stacks and len(stacks) == len(readers):
        return _of_stacks(producer, stacks)
    # What is spread out, as a bias over an image, lay nowhere in that size.
    moves = [end for end in ends if only_moves(end) and not broadcasts(end) and end not in stacks]
    return _of_moves(producer, readers, moves)


def of_filled(filler: LaunchRow, writers: Sequence[LaunchRow]) -> Remedy:
    """The remedy for an array that is filled with one value before a loop's launches write all of it."""
    steps = max(writer.repeat for writer in writers) // max(filler.repeat, 1)
    return loop_texts.APART if steps <= loop_texts.MOST_STEPS else loop_texts.GIVEN


def _of_scatters(table: Table, producer: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy for what a scatter starts from, and for the numbers of its updates."""
    scatters = [reader for reader in table.readers.get(producer.index, ()) if has(reader, "scatter")]
    if any(map(numbers_updates, (producer, *scatters))):
        return texts.UNIQUE
    if not fills(producer) or not scatters:
        return None
    if any(reader in scatters for reader in readers):
        return texts.ADD_TO
    # An optimizer reads what was scattered, too.
    of_tables = all(any(each in scatters for each in table.producers(reader)) for reader in readers)
    of_tables = of_tables and all(scatter.phase == "backward" and scatters_rows(scatter) for scatter in scatters)
    return texts.ROWS_UPDATED if of_tables else None


def _of_moves(producer: LaunchRow, readers: Sequence[LaunchRow], moves: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy for ends that cut, join, pad or transpose."""
    if any(map(changes_layout, moves)):
        convolutions = [end for end in (producer, *readers) if convolves(end)]
        return filter_layout(convolutions) if convolutions else texts.LAYOUT
    return None if not moves or has(moves[0], "concatenate") else texts.PARTS


def _stacks(table: Table, move: LaunchRow) -> bool:
    """Whether a launch copies what a loop's step leaves into a stack, which the loop itself does not read."""
    users = [user for user in table.readers.get(move.index, ()) if user is not move]
    is_left = all(user.computation != move.computation for user in users)
    moves = only_moves(move) or 0 < move.flops <= _OF_INDEX
    return move.repeat > 1 and has(move, "dynamic-update-slice") and moves and is_left


def _of_stacks(producer: LaunchRow, stacks: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy for what a loop's step leaves, and launches copy into stacks; None where only a kernel helps."""
    if producer.repeat <= loop_texts.MOST_STEPS:
        return loop_texts.STACKED
    # Of several steps at once XLA fuses all but products and library calls.
    is_fused = stacks[0].limiter == "overhead" or not (is_product(producer) or is_library_kernel(producer))
    return loop_texts.UNROLLED if is_fused else None


def _of_stack(part: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy for a part that a loop copies out of a stack; None where only a kernel helps."""
    if all(knows_all_steps(part, reader) for reader in readers):
        return loop_texts.HOISTED
    if part.repeat <= loop_texts.MOST_STEPS:
        return loop_texts.UNSTACKED
    return loop_texts.UNROLLED if part.limiter == "overhead" else None
