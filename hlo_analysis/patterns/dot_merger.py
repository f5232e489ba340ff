"""Whether XLA's dot merger could make one product of several that read one value.

It puts products side by side that have the value for the same factor and sum over the same of its axes. So the three of
query, key and value are merged, and dx = dy wᵀ and dw = xᵀ dy are not: one sums over the columns of dy, the other over
its rows. Both were seen with `xla_gpu_dot_merger_threshold_mb=1024`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hlo_analysis.hlo import Shape
from hlo_analysis.hlo.attributes import dot_dimensions
from hlo_analysis.program.facts import LaunchFacts, LaunchRow

# Sums are taken for equally long if they are within this; what is fused around a product adds a little to its FLOPs.
_ALIKE = 1.25


def can_merge(products: Sequence[LaunchRow], shared: str) -> bool:
    """Whether the products that read the value `shared` could be one, as far as their records tell."""
    sums = [_sum_length(product) for product in products]
    roles = {role for product in products if (role := _role(product, shared)) is not None}
    if max(sums) > _ALIKE * min(sums) or len(roles) > 1:
        return False
    results = [_matrix(product) for product in products]
    return any(len(set(sizes)) == 1 for sizes in zip(*results, strict=True))


def _matrix(product: LaunchRow) -> tuple[str, str]:
    """Rows and columns of a product's result. Products merge side by side only if one of the two agrees."""
    sizes = _sizes(product)
    return ("", product.name) if len(sizes) < 2 else (f"rows {sizes[-2]}", f"columns {sizes[-1]}")


def _sum_length(product: LaunchRow) -> float:
    """How many products each element of a result adds up, about; 0 where it is not known."""
    last = [int(size) for size in _sizes(product)[-2:] if size.isdecimal() and int(size)]
    return product.flops / (2 * prod(last))


def _sizes(product: LaunchRow) -> list[str]:
    return product.outputs[0].shape.partition("[")[2].partition("]")[0].split(",") if product.outputs else []


def _role(product: LaunchRow, shared: str) -> tuple[int, tuple[int, ...]] | None:
    """Which factor of a fused product a value is, and the axes of it that are summed over; None if not seen."""
    dots = product.facts.of("dot")
    dimensions = dot_dimensions(dots[0]) if dots else None
    if dimensions is None:
        return None
    for side, axes in ((0, dimensions.lhs_contracting), (1, dimensions.rhs_contracting)):
        if shared in _values(product.facts, dots[0].operands[side]):
            return side, axes
    return None


def _values(facts: LaunchFacts, factor: str) -> set[str]:
    """Values outside the launch that a factor is computed from by steps that keep its dimensions and layout."""
    found, queue, seen = set[str](), [factor], {factor}
    while queue:
        name = queue.pop()
        if name in facts.parameters:
            found.add(facts.parameters[name])
        instruction = facts.instructions.get(name)
        for operand in instruction.operands if instruction else ():
            other = facts.instructions.get(operand)
            if instruction and other and operand not in seen and _axes(other.shape) == _axes(instruction.shape):
                queue.append(operand)
                seen.add(operand)
    return found


def _axes(shape: Shape) -> tuple[object, ...]:
    """Sizes and layout of an array, whatever its type."""
    return shape.dimensions, shape.layout
