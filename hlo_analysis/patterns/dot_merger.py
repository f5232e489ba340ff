"""Whether XLA's dot merger could make one product of several that read one value.

It puts products side by side that have the value for the same factor and sum over the same of its axes. So the three of
query, key and value are merged, and dx = dy wᵀ and dw = xᵀ dy are not: one sums over the columns of dy, the other over
its rows. Both were seen with `xla_gpu_dot_merger_threshold_mb=1024`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from hlo_analysis.records import Launch

# Sums are taken for equally long if they are within this; what is fused around a product adds a little to its FLOPs.
_ALIKE = 1.25
_NAME = r"%([\w.\-]+)"


def can_merge(products: Sequence[Launch], shared: str) -> bool:
    """Whether the products that read the value `shared` could be one, as far as their records tell."""
    sums = [_sum_length(product) for product in products]
    roles = {role for product in products if (role := _role(product, shared)) is not None}
    if max(sums) > _ALIKE * min(sums) or len(roles) > 1:
        return False
    results = [_matrix(product) for product in products]
    return any(len(set(sizes)) == 1 for sizes in zip(*results, strict=True))


def _matrix(product: Launch) -> tuple[str, str]:
    """Rows and columns of a product's result. Products merge side by side only if one of the two agrees."""
    sizes = _sizes(product)
    return ("", product.name) if len(sizes) < 2 else (f"rows {sizes[-2]}", f"columns {sizes[-1]}")


def _sum_length(product: Launch) -> float:
    """How many products each element of a result adds up, about; 0 where it is not known."""
    last = [int(size) for size in _sizes(product)[-2:] if size.isdecimal() and int(size)]
    return product.flops / (2 * prod(last))


def _sizes(product: Launch) -> list[str]:
    return product.outputs[0].shape.partition("[")[2].partition("]")[0].split(",") if product.outputs else []


def _role(product: Launch, shared: str) -> tuple[int, str] | None:
    """Which factor of a product in a fusion a value is, and the axes of it that are summed over; None if not seen."""
    fused = re.search(r" fusion\(([^)]*)\)", product.hlo)
    dot = re.search(rf" dot\({_NAME}, {_NAME}\)(.*)", product.hlo)
    if not fused or not dot:
        return None
    operands = re.findall(_NAME, fused[1])
    for side, axes in ((1, "lhs_contracting_dims"), (2, "rhs_contracting_dims")):
        if shared in {operands[number] for number in _parameters(product, dot[side])}:
            summed = re.search(rf"{axes}={{([\d,]*)}}", dot[3])
            return side, summed[1] if summed else ""
    return None


def _parameters(product: Launch, factor: str) -> set[int]:
    """Numbers of the parameters that a factor is made of, where each step keeps its shape."""
    made = {name: (shape, text) for name, shape, text in re.findall(rf"{_NAME} = (\S+) \S*\((.*)", product.hlo)}
    found, queue, seen = set[int](), [factor], {factor}
    while queue:
        shape, text = made.get(queue.pop(), ("", ""))
        if number := re.match(r"(\d+)\)", text):
            found.add(int(number[1]))
        alike = {name for name in re.findall(_NAME, text.partition(")")[0]) if _axes(made.get(name)) == _axes((shape,))}
        queue += alike - seen
        seen |= alike
    return found


def _axes(made: tuple[str, ...] | None) -> str:
    """Sizes of an array, whatever its type; '' where it is not known."""
    return made[0].partition("[")[2] if made else ""
