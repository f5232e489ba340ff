"""Counts the bytes that strided reads take from the L2 cache.

A warp reads sectors of 32 bytes. XLA's loop emitter assigns consecutive results to consecutive threads. Under a
transpose that moves the fastest dimension, each thread may need a sector of its own. (Where both dimensions are long,
XLA uses its transpose emitter, which goes through shared memory.)
"""

from __future__ import annotations

from hlo_analysis.hlo import Computation, Instruction, Module, Shape
from hlo_analysis.hlo.attributes import integers
from hlo_analysis.records import LaunchKind

SECTOR_BYTES = 32
_WARP = 32
_ONE_TO_ONE = frozenset({"bitcast", "concatenate", "convert", "copy", "negate", "reshape"})


def cache_bytes(module: Module, instruction: Instruction, kind: LaunchKind) -> int:
    """Returns the bytes a loop fusion reads, in whole sectors, and writes; 0 unless a transpose scatters its reads."""
    if kind != "loop" or instruction.opcode != "fusion":
        return 0
    body = module.computations[instruction.called[0]]
    scattered = 0
    for transpose in body.instructions.values():
        source = _source(body, transpose) if transpose.opcode == "transpose" else None
        if source is not None:
            sectors = _sectors_of_a_warp(transpose, body.instructions[transpose.operands[0]].shape, source)
            per_result = sectors * SECTOR_BYTES / min(_WARP, transpose.shape.element_count)
            scattered += round(transpose.shape.element_count * per_result) if sectors else 0
    return scattered + instruction.shape.byte_size if scattered else 0


def _source(body: Computation, transpose: Instruction) -> Shape | None:
    """Returns the shape of the parameter that a transpose reads element by element.

    Returns None if other work lies between them. If several parameters are concatenated, the first stands for all.
    """
    found = body.instructions[transpose.operands[0]]
    while found.opcode in _ONE_TO_ONE:
        found = body.instructions[found.operands[0]]
    return found.shape if found.opcode == "parameter" else None


def _sectors_of_a_warp(transpose: Instruction, operand: Shape, source: Shape) -> int:
    """Counts the sectors that hold the operand elements of one warp's results; 0 if a layout is not row-major."""
    shapes = (transpose.shape, operand)
    if any(each.layout and each.layout.minor_to_major != _plain(each) for each in shapes):
        return 0
    order, results = integers(transpose, "dimensions"), transpose.shape.dimensions
    strides = [1] * len(operand.dimensions)
    for axis in range(len(strides) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * operand.dimensions[axis + 1]
    element_bytes = source.byte_size // max(1, source.element_count)
    sectors = set()
    for thread in range(min(_WARP, transpose.shape.element_count)):
        place, rest = 0, thread
        for axis in range(len(results) - 1, -1, -1):
            rest, index = divmod(rest, results[axis])
            place += index * strides[order[axis]]
        sectors.add(place * element_bytes // SECTOR_BYTES)
    return len(sectors)


def _plain(shape: Shape) -> tuple[int, ...]:
    return tuple(reversed(range(len(shape.dimensions))))
