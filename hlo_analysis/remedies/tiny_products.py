"""Finds products with tiny matrices, as of rotations, colours, quadrature and Clebsch-Gordan coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hlo_analysis.patterns.launch_patterns import SMALL_SIZE, factors, is_library_kernel, is_product
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.remedies.texts import Remedy, rewrite

AS_SUM = rewrite(
    "multiply and add, (x[..., :, None] * m).sum(-2) in place of x @ m or jnp.einsum: XLA fuses a short sum with "
    f"what stands before and after it, and a product, here of a matrix of at most {SMALL_SIZE} × {SMALL_SIZE}, with "
    "little or nothing",
    code="# before: x @ m\ny = (x[..., :, None] * m).sum(-2)\n"
    '# before: jnp.einsum("eci,ej,ijk->eck", a, b, m)\n'
    "y = (a[:, :, :, None, None] * b[:, None, None, :, None] * m).sum((2, 3))",
)


def of_tiny_products(producer: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy next to a product with a tiny matrix; None where there is none, or a kernel that fuses with no sum."""
    is_first = multiplies_by_tiny_matrix(producer)
    others = [reader for reader in readers if not multiplies_by_tiny_matrix(reader)]
    if is_first and not others:  # one einsum of three operands and more is one sum, two layers of a network are not
        is_one = producer.op_name.partition("->")[0].count(",") > 1
        return AS_SUM if is_one and all(reader.op_name == producer.op_name for reader in readers) else None
    if is_first == bool(others):
        return AS_SUM if not any(map(_is_alone, others if is_first else [producer])) else None
    return None


def _is_alone(launch: LaunchRow) -> bool:
    """Whether no sum fuses with a launch."""
    return is_product(launch) or is_library_kernel(launch) or launch.kind in ("sort", "collective")


def multiplies_by_tiny_matrix(launch: LaunchRow) -> bool:
    """Whether a launch is a product of short sums, one of whose factors has few elements for each of them and batch."""
    known = factors(launch) if is_product(launch) else None
    if known is None:
        return False
    *shapes, dimensions = known
    axes = (*dimensions.lhs_batch, *dimensions.lhs_contracting)
    if max(axes, default=0) >= len(shapes[0].dimensions):  # of a library's call on a view of its operand
        return False
    batches, summed = (
        prod(shapes[0].dimensions[axis] for axis in found)
        for found in (dimensions.lhs_batch, dimensions.lhs_contracting)
    )
    smallest = min(shape.element_count for shape in shapes)
    return 1 < summed <= SMALL_SIZE and smallest <= SMALL_SIZE * batches * summed
