"""Counts what takes a launch longer than its bytes and FLOPs say."""

from __future__ import annotations

from collections.abc import Mapping

from hlo_analysis.hlo import Instruction, Shape

ALIGNED_BYTES = 16
"""What one thread loads at once, and TMA's least pitch of rows."""
_ATOMIC_TYPES = ("bf16", "f16")
"""Without an atomic addition: XLA compares and swaps a word until no other thread has come between."""


def reduced_elements(instructions: Mapping[str, Instruction]) -> int:
    """Returns how many elements the reductions of a launch read, each of which needs its index."""
    reductions = [each for each in instructions.values() if each.opcode == "reduce"]
    operands = [instructions.get(each.operands[0]) for each in reductions]
    return sum(each.shape.element_count for each in operands if each is not None)


def atomic_updates(instructions: Mapping[str, Instruction]) -> int:
    """Returns how many elements of 16 bits a scatter combines with those in memory."""
    return sum(
        updates.shape.element_count
        for each in instructions.values()
        if each.opcode == "scatter" and each.attributes.get("unique_indices") != "true"
        if (updates := instructions.get(each.operands[-1])) and updates.shape.element_type in _ATOMIC_TYPES
    )


def row_alignment(instructions: Mapping[str, Instruction]) -> int:
    """Returns how many bytes the starts of the rows of a fused product's operands are all multiples of, 16 at most."""
    names = [name for each in instructions.values() if each.opcode == "dot" for name in each.operands]
    rows = [_row_bytes(instructions[name].shape) for name in names if name in instructions]
    return min((ALIGNED_BYTES, *(size & -size for size in rows if size)))


def _row_bytes(shape: Shape) -> int:
    """Returns the bytes of the fastest dimension; 0 for a vector, which has one row."""
    if len(shape.dimensions) < 2 or not shape.element_count:
        return 0
    fastest = shape.layout.minor_to_major[0] if shape.layout else len(shape.dimensions) - 1
    return shape.dimensions[fastest] * shape.byte_size // shape.element_count
