"""Speed of operations that multiply matrices, in TF/s: what sets their time where memory does not."""

from __future__ import annotations

from pallas_kernels import REGISTRY
from pallas_kernels.specs import plain
from xlafuse.bench.results import ShapeResult


def product_flops(shape: ShapeResult) -> int | None:
    """Additions and multiplications of a shape's matrix products, None where the operation has none or is unknown."""
    op = REGISTRY.get(shape.op)
    if op is None or op.flops is None:
        return None
    spec = next((spec for spec in op.arg_specs if spec.name == shape.spec), None)
    if spec is None:
        return None
    return op.flops(plain(spec.structs()), shape.phase)


RIDGE = 200
"""Operations a byte from which an H200's tensor cores set the time, and not its memory: some 800 TF/s over 4.2 TB/s."""


def is_bound_by_products(shape: ShapeResult) -> bool:
    """Whether a perfect kernel's time is that of its matrix products."""
    flops = product_flops(shape)
    return flops is not None and flops > RIDGE * shape.bytes


def teraflops_per_second(shape: ShapeResult, name: str) -> float | None:
    """Of a candidate, None where the operation has no matrix products or `name` was not timed."""
    flops = product_flops(shape)
    timed = next((c.timing.median_us for c in shape.candidates if c.name == name), None)
    return None if flops is None or timed is None else flops / timed / 1e6
