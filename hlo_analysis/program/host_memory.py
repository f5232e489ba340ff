"""Separates traffic of arrays in host memory (offloading) from the GPU's own HBM traffic."""

from __future__ import annotations

from dataclasses import replace

from hlo_analysis.costs.traffic import Usage
from hlo_analysis.hlo import Computation, Instruction, Shape
from hlo_analysis.program.dataflow import leaf_shape

HOST_SPACE = 5
"""The memory space of pinned host memory in XLA's layouts (`S(5)`)."""


def is_on_host(shape: Shape) -> bool:
    """Whether an array is in host memory."""
    return shape.layout is not None and shape.layout.memory_space == HOST_SPACE


def without_host(usage: Usage, computation: Computation, instruction: Instruction) -> tuple[Usage, int]:
    """Splits the traffic of one instruction of `computation` into its HBM usage and the bytes in host memory."""
    operands = [computation.instructions[name].shape for name in instruction.operands]
    reads = {
        (position, path): 0
        for position, path in usage.reads
        if is_on_host(leaf_shape(operands[position] if position >= 0 else instruction.shape, path))
    }
    writes = {path: 0 for path in usage.writes if is_on_host(leaf_shape(instruction.shape, path))}
    moved = sum(usage.reads[key] for key in reads) + sum(usage.writes[path] for path in writes)
    if not moved:
        return usage, 0
    rest = replace(usage, reads={**usage.reads, **reads}, writes={**usage.writes, **writes})
    least = rest.bytes_read + rest.bytes_written
    return replace(rest, unfused_bytes=max(usage.unfused_bytes - moved, least)), moved
