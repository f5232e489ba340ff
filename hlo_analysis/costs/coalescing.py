"""Counts the bytes that strided reads take from the L2 cache.

A warp reads sectors of 32 bytes. XLA's loop emitter assigns consecutive results to consecutive threads. Under a
transpose that moves the fastest dimension, each thread may need a sector of its own. (Where both dimensions are long,
XLA uses its transpose emitter, which goes through shared memory.) A Triton kernel that transposes or sums over columns
may read a few elements of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hlo_analysis.hlo import Computation, Instruction, Module, Shape
from hlo_analysis.hlo.attributes import integers, tile_sizes
from hlo_analysis.records import LaunchKind

_FETCH_BYTES = 64
"""What the L2 cache fetches from memory at once (default of CUDA's `cudaLimitMaxL2FetchGranularity`)."""
_ONE_TO_ONE = frozenset({"bitcast", "concatenate", "convert", "copy", "negate", "reshape"})


def cache_bytes(module: Module, instruction: Instruction, kind: LaunchKind, threads: int = 0) -> int:
    """Returns the bytes that a fusion reads, in whole sectors, and writes; 0 unless its reads are scattered."""
    if instruction.opcode != "fusion":
        return 0
    body = module.computations[instruction.called[0]]
    if kind == "triton":
        fetched = _tile_bytes(body, tile_sizes(instruction))
        return fetched + instruction.shape.byte_size if fetched else 0
    if kind not in ("loop", "transpose", "reduction"):
        return 0
    from hlo_analysis.costs.warp_reads import strided_bytes  # needs numpy, which commands that analyze nothing lack

    read = strided_bytes(body.instructions, body.root_instruction, kind, threads)
    return read + instruction.shape.byte_size if read else 0


def _tile_bytes(body: Computation, tiles: Sequence[int]) -> int:
    """Returns the bytes that transposes and sums over columns by Triton fetch in tiles narrower than a fetch, or 0."""
    total, transposes = 0, sum(found.opcode == "transpose" for found in body.instructions.values())
    for found in body.instructions.values():
        if found.opcode == "transpose" and transposes > 1:
            continue  # one may turn back what another did
        operand = body.instructions[found.operands[0]].shape if found.opcode in ("transpose", "reduce") else None
        if operand is None or len(found.shape.dimensions) != len(tiles):
            continue
        axes, results = integers(found, "dimensions"), iter(tiles)
        if found.opcode == "transpose":
            sizes = [tiles[axes.index(axis)] for axis in range(len(tiles))]
        else:
            sizes = [size if axis in axes else next(results) for axis, size in enumerate(operand.dimensions)]
        source = _source(body, found) or operand
        width = source.element_bytes
        if sizes[-1] < operand.dimensions[-1] and sizes[-1] * width < _FETCH_BYTES:
            total += width * operand.element_count * _excess(operand, sizes, width)
    return round(total)


def _excess(shape: Shape, sizes: Sequence[int], width: int) -> float:
    """Returns how many bytes a tile of a row-major array fetches for each that it reads."""
    places = {0}
    for size, stride in zip(sizes, _strides(shape), strict=True):
        places = {place + at * stride for place in places for at in range(min(size, _FETCH_BYTES))}
    return len({place * width // _FETCH_BYTES for place in places}) * _FETCH_BYTES / (len(places) * width)


def _source(body: Computation, transpose: Instruction) -> Shape | None:
    """Returns the shape of the parameter that a transpose reads element by element.

    Returns None if other work lies between them. If several parameters are concatenated, the first stands for all.
    """
    found = body.instructions[transpose.operands[0]]
    while found.opcode in _ONE_TO_ONE:
        found = body.instructions[found.operands[0]]
    return found.shape if found.opcode == "parameter" else None


def _strides(shape: Shape) -> list[int]:
    return [prod(shape.dimensions[axis + 1 :]) for axis in range(len(shape.dimensions))]
