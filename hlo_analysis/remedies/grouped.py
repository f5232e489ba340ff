"""Finds what XLA makes of grouped products (`lax.ragged_dot`): one dense product over all groups, of masked arrays."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_analysis.patterns.launch_patterns import is_product
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.remedies.table import Table
from hlo_analysis.remedies.texts import Remedy

GROUPED = Remedy(
    kind="kernel",
    code="from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # for Hopper\n\n"
    "y = ragged_dot(x, w, group_sizes=group_sizes, block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, "
    "grid_block_n=1)",
    text="a grouped product, each group's rows times that group's matrix alone (as ragged_dot of "
    "jax.experimental.pallas.ops.gpu.ragged_dot_mgpu on Hopper): XLA writes the rows once for every group, all but one "
    "of them zeros, and multiplies all of it",
)


def of_groups(table: Table, producer: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy for a value within the expansion of a grouped product; None for its result, and elsewhere."""
    if not table.expanded.issuperset(reader.index for reader in readers):
        return None
    is_inside = producer.index in table.expanded and not is_product(producer)
    is_to_mask = all(_groups_masked(reader) > 1 for reader in readers)
    return GROUPED if is_inside or is_to_mask or _groups_masked(producer) > 1 else None


def wasted_us(table: Table, ends: Sequence[LaunchRow], overhead_us: float) -> dict[int, float]:
    """Returns the microseconds that products spend on rows of other groups, which are zeros, by index of the launch."""
    return {
        end.index: (1 - 1 / _groups_multiplied(table, end)) * max(end.roofline_us - overhead_us, 0.0) * end.repeat
        for end in ends
        if is_product(end) and end.limiter == "compute" and end.index in table.expanded
    }


def _groups_multiplied(table: Table, product: LaunchRow) -> int:
    """The number of groups that a product's factors were masked for, 1 where no launch shows it."""
    found, queue, seen = 1, table.producers(product), set[int]()
    while queue:
        launch = queue.pop()
        if launch.index in seen:
            continue
        seen.add(launch.index)
        found = max(found, _groups_masked(launch))
        if launch.index in table.expanded and not is_product(launch):  # may only transpose what another masked
            queue += table.producers(launch)
    return found


def _groups_masked(launch: LaunchRow) -> int:
    """How many copies of an array a launch makes, each with zeros for the rows of other groups; 1 if it does not."""
    copies = [1]
    for select in launch.facts.of("select"):
        rows = launch.facts.operand(select, 1)
        source = launch.facts.operand(rows, 0) if rows and rows.opcode == "broadcast" else None
        copies += [rows.shape.element_count // max(source.shape.element_count, 1)] if rows and source else []
    return max(copies)
