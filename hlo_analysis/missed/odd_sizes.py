"""Finds matrix products of sizes that no library's kernel takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from hlo_analysis.costs.slow_work import ALIGNED_BYTES, loads_slowly
from hlo_analysis.decisions import categories
from hlo_analysis.missed.cost import Candidate, missed
from hlo_analysis.missed.program import Program
from hlo_analysis.patterns.launch_patterns import shape_of
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.records import Device
from hlo_analysis.remedies import texts


def odd_sizes(program: Program) -> Iterator[Candidate]:
    """Yields one missed fusion for all products that read rows of the same odd length."""
    found: dict[int, list[LaunchRow]] = defaultdict(list)
    for launch in program.launches:
        is_slow = launch.kind == "triton_gemm" and loads_slowly(launch.facts.instructions)
        if is_slow and (size := _odd_size(launch)):
            found[size].append(launch)
    for size, products in found.items():
        padded = _padded(size)
        sizes = {"size": size, "padded": padded, "more": padded - size}
        remedy = replace(texts.PADDED, text=texts.PADDED.text.format(**sizes), code=texts.PADDED.code.format(**sizes))
        operands = [value for value in products[0].inputs if size in shape_of(value.shape).dimensions]
        value = max(operands or products[0].inputs, key=lambda value: value.bytes)
        yield missed(
            program.device,
            value,
            producer=products[0].index if value.producer is None else value.producer,
            consumers=tuple(product.index for product in products),
            saved={},
            removed=(),
            slow_us=sum(_slow_us(product, program.device) for product in products),
            ends=products,
            reason=f"[rows of {size} elements are multiplied, which no cuBLAS kernel takes; products: {len(products)}]",
            category=categories.ODD_SIZE,
            remedy=remedy.named(program.catalogue, products),
        )


def _odd_size(product: LaunchRow) -> int:
    """Returns the length of an operand's rows that begin between multiples of 16 bytes; 0 where all are aligned."""
    for dot in product.facts.of("dot"):
        for number in range(2):
            operand = product.facts.operand(dot, number)
            if operand is not None and len(operand.shape.dimensions) > 1 and operand.shape.element_count:
                shape = operand.shape
                size = shape.dimensions[shape.minor_to_major[0]]
                if size * shape.byte_size // shape.element_count % ALIGNED_BYTES:
                    return size
    return 0


def _padded(size: int) -> int:
    multiple = 64 if size >= 4096 else 8  # as `xlafuse.fuse` does
    return -(-size // multiple) * multiple


def _slow_us(product: LaunchRow, device: Device) -> float:
    """Returns how much longer a product takes than with aligned rows."""
    even_us = max(product.estimated_us * device.efficiency.slow_loads, product.roofline_us)
    return product.repeat * (product.estimated_us - even_us)
