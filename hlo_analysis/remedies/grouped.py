"""Finds what XLA makes of grouped products (`lax.ragged_dot`): one dense product over all groups, of masked arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hlo_analysis.patterns.launch_patterns import is_product, only_moves
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.remedies.table import Table
from hlo_analysis.remedies.texts import Remedy, kernel

_GROUPED = kernel(
    "a grouped product, each group's rows times that group's matrix alone: XLA multiplies all rows by every "
    "group's matrix{expansion}",
    pattern="grouped_linear",
)
EPILOGUE = kernel(
    "what follows the grouped product done in its epilogue (an activation, a gate, the sum of two products), "
    "before the result is written",
    pattern="grouped_linear",
)


def is_grouped(remedy: Remedy) -> bool:
    """Whether a remedy makes one grouped product of XLA's expansion."""
    return remedy.pattern == _GROUPED.pattern


def of_groups(table: Table, producer: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy for a value within the expansion of a grouped product; None for its result, and elsewhere."""
    if not table.expanded.issuperset(reader.index for reader in readers):
        return None
    is_inside = producer.index in table.expanded and not is_product(producer)
    is_to_mask = all(_groups_masked(reader) > 1 for reader in readers)
    return of_operand(table, readers) if is_inside or is_to_mask or _groups_masked(producer) > 1 else None


def of_operand(table: Table, readers: Sequence[LaunchRow]) -> Remedy:
    """The remedy for a value that grouped products read, or what masks, transposes or pads for them."""
    products = list(_products(table, readers))
    made = {launch.index: launch for product in products for launch in _made_for(table, product)}.values()
    copies = [launch for launch in made if only_moves(launch) or _groups_masked(launch) > 1]
    written = sum(launch.bytes_written * launch.repeat for launch in copies)
    groups = max((_groups_multiplied(table, product) for product in products), default=1)
    expansion = f", {groups} times the arithmetic" if groups > 1 else ""
    expansion += f", and writes {written / 1e6:,.0f} MB of copies, most of them zeros" if written else ""
    return replace(_GROUPED, text=_GROUPED.text.format(expansion=expansion))


def _products(table: Table, launches: Sequence[LaunchRow]) -> Iterator[LaunchRow]:
    """Yields the grouped products among launches, and those that what the others make is for."""
    for launch in launches:
        if is_product(launch):
            yield launch
        elif launch.index in table.expanded:
            yield from _products(
                table, [reader for reader in table.readers[launch.index] if reader.index > launch.index]
            )


def _made_for(table: Table, reader: LaunchRow) -> Iterator[LaunchRow]:
    """Yields the launches that mask, transpose or pad for a grouped product."""
    for launch in table.producers(reader):
        if launch.index in table.expanded and launch.index < reader.index and not is_product(launch):
            yield launch
            yield from _made_for(table, launch)


def wasted_us(table: Table, ends: Sequence[LaunchRow], overhead_us: float) -> dict[int, float]:
    """Returns the microseconds that products spend on rows of other groups, which are zeros, by index of the launch."""
    return {
        end.index: (1 - 1 / _groups_multiplied(table, end)) * max(end.roofline_us - overhead_us, 0.0) * end.repeat
        for end in ends
        if is_product(end) and end.limiter == "compute" and end.index in table.expanded
    }


def _groups_multiplied(table: Table, product: LaunchRow) -> int:
    """The number of groups that a product's factors were masked for, 1 where no launch shows it."""
    near = (*table.producers(product), *_made_for(table, product))
    return max((_groups_masked(launch) for launch in near), default=1)


def _groups_masked(launch: LaunchRow) -> int:
    """How many copies of an array a launch makes, each with zeros for the rows of other groups; 1 if it does not."""
    copies = [1]
    for select in launch.facts.of("select"):
        rows = launch.facts.operand(select, 1)
        source = launch.facts.operand(rows, 0) if rows and rows.opcode == "broadcast" else None
        copies += [rows.shape.element_count // max(source.shape.element_count, 1)] if rows and source else []
    return max(copies)
