"""Chooses the remedy for a value that one launch writes and others read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hlo_analysis.decisions import categories
from hlo_analysis.patterns.launch_patterns import (
    draws_in_a_loop,
    has,
    is_invariant,
    only_moves,
)
from hlo_analysis.patterns.pair_patterns import is_next_state
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.remedies import loop_texts, texts
from hlo_analysis.remedies.convolutions import of_convolutions
from hlo_analysis.remedies.data_movement import of_places
from hlo_analysis.remedies.grouped import of_groups
from hlo_analysis.remedies.products import of_products, summed_in_a_loop
from hlo_analysis.remedies.rows import of_rows
from hlo_analysis.remedies.table import Table
from hlo_analysis.remedies.texts import Remedy
from hlo_analysis.remedies.tiny_products import of_tiny_products
from hlo_analysis.rules import attempt


def vertical_remedy(
    table: Table,
    producer: LaunchRow,
    readers: Sequence[LaunchRow],
    category: str,
    *,
    is_score: bool,
    is_projected: bool,
    of_attention: bool,
    donated: Collection[str],
) -> Remedy:
    """The remedy for a value that `producer` writes and `readers` read, by what stands on both ends.

    Args:
        table: the launch table.
        producer: the launch that writes the value.
        readers: those that read it and could be one kernel with the producer.
        category: why XLA left them apart.
        is_score: whether the value is one of attention scores, or made from them.
        is_projected: whether the value is transposed between attention's products and the projections around them.
        of_attention: whether the producer is a product that makes or reads attention scores.
        donated: names of arguments whose buffers the program may overwrite.
    """
    return (
        attempt(_by_category, None, table, producer, readers, category, donated)
        or (texts.ATTENTION if is_score else None)
        or (loop_texts.INVARIANT if is_invariant(producer) else None)
        or (loop_texts.DRAWN if draws_in_a_loop(producer) else None)
        or attempt(_of_devices, None, table, producer, readers)
        or attempt(of_groups, None, table, producer, readers)
        or attempt(of_tiny_products, None, producer, readers)
        or attempt(of_convolutions, None, producer, readers)
        or attempt(of_places, None, table, producer, readers, is_projected=is_projected)
        or attempt(of_products, None, table, producer, readers, of_attention=of_attention)
        or attempt(of_rows, texts.ONE_KERNEL, table, producer, readers)
    )


def _by_category(
    table: Table, producer: LaunchRow, readers: Sequence[LaunchRow], category: str, donated: Collection[str]
) -> Remedy | None:
    """The remedy that follows from why XLA left them apart, whatever they do."""
    ends = (producer, *readers)
    if category == categories.SWITCHED_OFF:
        return texts.LEAVE_ON
    if category == categories.INSERTED:
        if any(has(end, "all-reduce") for end in ends) and any(map(only_moves, ends)):
            return texts.SEPARATE_SUMS
        if copies := [end for end in ends if has(end, "copy")]:
            return loop_texts.STATE if is_next_state(producer, copies[0]) else _copied(copies[0], donated)
    if category == categories.BOUNDARY:
        return summed_in_a_loop(table, producer, readers) or loop_texts.CARRIED
    return None


def _of_devices(table: Table, producer: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy where one end is a sum over devices, or was made for one."""
    ends = (producer, *readers)
    if any(end.kind == "collective" for end in ends):
        return texts.OVERLAP
    return texts.SEPARATE_SUMS if any(_joins_sums(table, end) for end in ends) else None


def _joins_sums(table: Table, move: LaunchRow) -> bool:
    """Whether a launch joins arrays for one sum over devices, or takes them apart after it, by XLA's own doing."""
    if not only_moves(move):
        return False
    near = (*table.producers(move), *table.readers.get(move.index, ()))
    return any(has(sums, "all-reduce") and move.op_name in ("", sums.op_name) for sums in near)


def _copied(copy: LaunchRow, donated: Collection[str]) -> Remedy:
    """The remedy for a copy that XLA put in to keep a buffer whole: by whose buffer it is."""
    source = copy.inputs[0] if copy.inputs else None
    if source is None or source.name.startswith("constant"):
        return texts.KEPT
    if source.producer is not None:  # made after the copy: a loop's state, which the iteration before left
        return loop_texts.STATE if source.producer > copy.index else texts.KEPT
    return texts.KEPT if source.name in donated else texts.DONATE
