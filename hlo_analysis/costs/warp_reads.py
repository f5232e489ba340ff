"""Counts the sectors of 32 bytes that the warps of XLA's own kernels read, by following elements to the parameters.

A thread computes its element of the result, and all that the element needs, by itself. Lanes of a warp have elements
side by side: of the result in a loop, of what is transposed or reduced in the kernels that go through shared memory.
Transposes, strided slices and reductions on the way to a parameter scatter the addresses that they read of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, prod

import numpy as np

from hlo_analysis.hlo import Instruction, Shape
from hlo_analysis.hlo.attributes import integers, slice_strides
from hlo_analysis.records import LaunchKind

SECTOR_BYTES = 32
_WARP = 32
_SAMPLES = 5
"""Warps that stand for all."""
_MOST_VISITS = 2000
_LOSSES = frozenset(
    ("constant", "iota", "gather", "dot", "convolution", "scatter", "sort", "reduce-window", "select-and-scatter",
     "custom-call", "rng-bit-generator", "dynamic-slice", "dynamic-update-slice", "get-tuple-element", "tuple")
)  # fmt: skip
"""Where elements cannot be followed, or lead to no memory."""
_MOVES = frozenset(
    ("transpose", "broadcast", "bitcast", "reshape", "slice", "pad", "reverse", "concatenate", "reduce")
)  # fmt: skip
"""Instructions whose elements have other indices than their operands'."""


def strided_bytes(body: Mapping[str, Instruction], root: Instruction, kind: LaunchKind, threads: int) -> int:
    """Returns the bytes that a kernel reads in whole sectors; 0 where its warps read nothing but what they need."""
    results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if kind != "loop" and not _is_loop(results[0], threads):
        results = [hero for each in results if (hero := _hero(body, each, kind))]
    if not results or results[0].shape.element_count < _WARP:
        return 0
    shape, sectors, needed = results[0].shape, 0.0, 0.0
    starts = [each for each in results if each.shape.dimensions == shape.dimensions]
    total = shape.element_count
    places = {at * (total // _SAMPLES) // _WARP * _WARP for at in range(_SAMPLES)}
    for place in places:
        read, least = _sectors_of_a_warp(body, starts, _indices(shape, np.arange(place, place + _WARP) % total))
        sectors, needed = sectors + read, needed + least
    return round(sectors / len(places) / _WARP * total * SECTOR_BYTES) if sectors > needed else 0


def _is_loop(result: Instruction, threads: int) -> bool:
    """Whether each thread has one, two or four elements of the result; it has eight of a tile in shared memory."""
    return bool(threads) and result.shape.element_count in (threads, 2 * threads, 4 * threads)


def _hero(body: Mapping[str, Instruction], result: Instruction, kind: LaunchKind) -> Instruction | None:
    """Returns what the kernel reads side by side: the operand of the last transpose or reduction before its result."""
    wanted, seen, waiting = ("reduce" if kind == "reduction" else "transpose"), set[str](), [result]
    while waiting:
        found = waiting.pop(0)
        if found.opcode == wanted:
            return body[found.operands[0]]
        waiting += [body[name] for name in found.operands if name not in seen]
        seen |= set(found.operands)
    return None


def _sectors_of_a_warp(
    body: Mapping[str, Instruction], starts: Sequence[Instruction], lanes: np.ndarray
) -> tuple[float, float]:
    """Returns the sectors that a warp reads, and those that hold as many elements side by side.

    A sector that is read on several ways counts once.
    """
    sectors: dict[tuple[str, float], set[int]] = {}
    places: dict[tuple[str, float], set[int]] = {}
    waiting, seen = [(each, lanes, 1.0) for each in starts], set[tuple[str, bytes]]()
    while waiting and len(seen) < _MOST_VISITS:
        found, at, times = waiting.pop()
        if (key := (found.name, at.tobytes())) in seen or not len(at):
            continue
        seen.add(key)
        if found.opcode == "parameter":
            width = found.shape.byte_size / max(1, found.shape.element_count)
            linear = at @ np.array(_strides(found.shape), np.int64) if at.shape[1] else np.zeros(1, np.int64)
            sectors.setdefault((found.name, times), set()).update((linear * width // SECTOR_BYTES).astype(int).tolist())
            places.setdefault((found.name, times), set()).update((linear * width).astype(int).tolist())
        else:
            waiting += [(body[name], indices, times * more) for name, indices, more in _before(body, found, at)]
    least = sum(
        times * ceil(len(found) * body[name].shape.byte_size / max(1, body[name].shape.element_count) / SECTOR_BYTES)
        for (name, times), found in places.items()
    )
    return sum(times * len(found) for (_, times), found in sectors.items()), least


def _before(
    body: Mapping[str, Instruction], found: Instruction, at: np.ndarray
) -> Iterator[tuple[str, np.ndarray, float]]:
    """Yields what elements of an instruction need: operand, its indices, and how many elements each stands for."""
    if found.opcode in _LOSSES:
        return
    operands = [body[name].shape for name in found.operands]
    if found.opcode not in _MOVES:
        yield from (
            (operand, at, 1.0)
            for operand, shape in zip(found.operands, operands, strict=True)
            if shape.dimensions == found.shape.dimensions
        )
        return
    name = found.operands[0] if found.operands else ""
    match found.opcode:
        case "transpose":
            order = integers(found, "dimensions")
            yield name, at[:, [order.index(axis) for axis in range(len(order))]], 1.0
        case "broadcast":
            yield name, at[:, list(integers(found, "dimensions"))] if operands[0].dimensions else at[:1, :0], 1.0
        case "bitcast" | "reshape":
            yield name, _indices(operands[0], at @ np.array(_strides(found.shape), np.int64)), 1.0
        case "slice":
            starts = [int(part.strip(" [").split(":")[0]) for part in found.attributes["slice"].strip("{}").split(",")]
            yield name, at * np.array(slice_strides(found)) + np.array(starts), 1.0
        case "pad":
            low = [int(part.split("_")[0]) for part in found.attributes["padding"].split("x")]
            moved = at - np.array(low)
            inside = ((moved >= 0) & (moved < np.array(operands[0].dimensions))).all(axis=1)
            yield name, moved[inside], 1.0
        case "reverse":
            turned = at.copy()
            for axis in integers(found, "dimensions"):
                turned[:, axis] = operands[0].dimensions[axis] - 1 - turned[:, axis]
            yield name, turned, 1.0
        case "concatenate":
            (axis,), begin = integers(found, "dimensions"), 0
            for operand, shape in zip(found.operands, operands, strict=True):
                moved = at.copy()
                moved[:, axis] -= begin
                begin += shape.dimensions[axis]
                yield operand, moved[(moved[:, axis] >= 0) & (moved[:, axis] < shape.dimensions[axis])], 1.0
        case "reduce":
            axes = integers(found, "dimensions")
            whole = np.zeros((len(at), len(operands[0].dimensions)), np.int64)
            whole[:, [axis for axis in range(whole.shape[1]) if axis not in axes]] = at
            count = prod(operands[0].dimensions[axis] for axis in axes)
            if operands[0].minor_to_major[0] in axes:  # a run of sectors, read once
                count = ceil(count * operands[0].byte_size / max(1, operands[0].element_count) / SECTOR_BYTES)
            yield name, whole, float(count)


def _strides(shape: Shape) -> list[int]:
    """Returns how many elements apart neighbours of each dimension lie in memory."""
    strides, step = [0] * len(shape.dimensions), 1
    for axis in shape.minor_to_major:
        strides[axis], step = step, step * shape.dimensions[axis]
    return strides


def _indices(shape: Shape, places: np.ndarray) -> np.ndarray:
    """Returns the indices of elements by their places in memory."""
    if not shape.dimensions:
        return np.zeros((len(places), 0), np.int64)
    sizes = np.array(shape.dimensions, np.int64)
    strides = np.maximum(1, np.array(_strides(shape), np.int64))
    return places[:, None] // strides % sizes
