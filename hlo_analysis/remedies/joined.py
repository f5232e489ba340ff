"""Finds joined arrays that a product sums over, with repeated parts: `jnp.concatenate([x, y[indices]], -1) @ w`.

A product for each part may then move less: what is repeated is multiplied once and never written. Each other part's
product writes a result, and their sum reads it, as much as was written and read of the part itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hlo_analysis.hlo import Instruction
from hlo_analysis.hlo.attributes import integers
from hlo_analysis.patterns.launch_patterns import factors, is_batched, is_product
from hlo_analysis.program.facts import LaunchRow, maker
from hlo_analysis.remedies import texts
from hlo_analysis.remedies.table import Table
from hlo_analysis.remedies.texts import Remedy

_REPEATED = 8
"""A part is repeated if it is at least so many times as large as what it is taken of."""
# What a launch more costs: 2.4 µs, and what small products take. XLA makes up to one more than there are parts. With
# that, 16384 rows of 256 and 256 features stay joined (40.2 to 40.5 µs), and 65536 do not (141.1 to 116.2 µs).
_LAUNCH_US = 3.0


def split_weight(table: Table, joined: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy where products that sum over a joined array would move enough less, each part multiplied by itself."""
    root, products = joined.facts.root, [reader for reader in readers if is_product(reader)]
    repeated = _repeated_parts(table, joined)
    if root is None or not repeated or not all(_sums_over(product, root) for product in products):
        return None
    whole, parts = joined.outputs[0].bytes, len(root.operands)
    results = sum(value.bytes for product in products for value in product.outputs[:1])
    saved = 2 * (whole - (parts - repeated) * results)
    us_per_byte = joined.roofline_us / joined.bytes_moved
    is_worth_it = saved * us_per_byte > _LAUNCH_US * (parts + 1)
    return replace(texts.SPLIT_WEIGHT, portion=saved / (2 * whole)) if is_worth_it else None


def _repeated_parts(table: Table, joined: LaunchRow) -> int:
    """How many of the parts that a launch joins along their last axis are repeated."""
    root = joined.facts.root
    if root is None or root.opcode != "concatenate":
        return 0
    if integers(root, "dimensions") != (len(root.shape.dimensions) - 1,):
        return 0
    parts = [joined.facts.operand(root, number) for number in range(len(root.operands))]
    return sum(part is not None and _is_repeated(table, joined, part) for part in parts)


def _is_repeated(table: Table, launch: LaunchRow, part: Instruction) -> bool:
    """Whether a part is broadcast or gathered of something much smaller, here or in the launch that writes it."""
    facts, found = launch.facts, part
    while found.opcode in ("bitcast", "reshape", "convert") and (operand := facts.operand(found, 0)):
        found = operand
    producer, made = maker(launch, found.name, table.launches) or (None, None)
    if found.opcode == "parameter" and producer is not None and made is not None:
        facts, found = producer.facts, made
    source = facts.operand(found, 0) if found.opcode in ("broadcast", "gather") else None
    return source is not None and _REPEATED * source.shape.element_count <= part.shape.element_count


def _sums_over(product: LaunchRow, joined: Instruction) -> bool:
    """Whether a product of two matrices sums over the last axis of a joined array."""
    known = factors(product)
    if known is None or is_batched(product):
        return False
    *shapes, dimensions = known
    return any(
        axes == (len(shape.dimensions) - 1,)
        and shape.dimensions[-1] == joined.shape.dimensions[-1]
        and shape.element_count == joined.shape.element_count
        for shape, axes in zip(shapes, (dimensions.lhs_contracting, dimensions.rhs_contracting), strict=True)
    )
