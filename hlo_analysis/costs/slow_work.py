"""Counts what takes a launch longer than its bytes and FLOPs say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil, prod

from hlo_analysis.hlo import Instruction, Shape
from hlo_analysis.hlo.attributes import convolution_labels, custom_call_target, dot_dimensions, integers
from hlo_analysis.program.dataflow import leaves

ALIGNED_BYTES = 16
"""What one thread loads at once, and TMA's least pitch of rows."""
_WORD_BYTES = 4
"""Least size of an asynchronous copy to shared memory (PTX `cp.async`)."""
_FORWARD_CONVOLUTIONS = ("__cudnn$convForward", "__cudnn$convBiasActivation", "__cudnn$convBackwardInput")
_ATOMIC_TYPES = ("bf16", "f16")
"""Without an atomic addition: XLA compares and swaps a word until no other thread has come between."""
_ADDED_WORDS = ("f32", "s32", "u32")
"""Added by the L2 cache, a sector at once."""
_SECTOR_BYTES = 32
_LINE_BYTES = 128
_WARP_SPAN = 128
"""Elements of a warp, four a thread."""
_WARP = 32
_TILE = 128
"""Rows and columns of the tiles in which cuDNN computes convolutions, at least."""
_VIEWS = ("bitcast", "broadcast", "convert", "copy", "reshape")


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomicUpdates:
    """What a scatter combines with elements of 16 bits in memory.

    elements: how many. width: the elements of one update (a row). places: into how many rows, where the program says
    so; None where data decides.
    """

    elements: int
    width: int
    places: int | None = None


def atomic_updates(instructions: Mapping[str, Instruction]) -> AtomicUpdates | None:
    """Returns what a scatter among the instructions of a launch adds by compare-and-swap, or None without one."""
    for scatter in instructions.values():
        updates = instructions.get(scatter.operands[-1]) if scatter.opcode == "scatter" else None
        if updates is None or scatter.attributes.get("unique_indices") == "true":
            continue
        if updates.shape.element_type in _ATOMIC_TYPES:
            width = prod(updates.shape.dimensions[axis] for axis in integers(scatter, "update_window_dims"))
            indices = scatter.operands[len(scatter.operands) // 2]
            is_one = _is_one_value(instructions, indices)
            return AtomicUpdates(elements=updates.shape.element_count, width=width, places=1 if is_one else None)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUpdates:
    """What a scatter of 32-bit elements has the L2 cache add.

    sectors: the sectors of all updates. requests: the same in lines of 128 bytes, which a warp sends at once.
    """

    sectors: int = 0
    requests: int = 0


def cache_updates(instructions: Mapping[str, Instruction]) -> CacheUpdates:
    """Counts what the L2 cache adds, each update apart.

    Where the fastest dimension is the one that is indexed, each element is in a sector of its own.
    """
    for scatter in instructions.values():
        if scatter.opcode != "scatter" or scatter.attributes.get("unique_indices") == "true":
            continue
        updates, result = instructions.get(scatter.operands[-1]), instructions.get(scatter.operands[0])
        if updates is not None and result is not None and updates.shape.element_type in _ADDED_WORDS:
            count, size = updates.shape.element_count, updates.shape.byte_size
            if _fastest(result.shape) in integers(scatter, "scatter_dims_to_operand_dims"):
                return CacheUpdates(sectors=count, requests=count)
            row = prod(updates.shape.dimensions[axis] for axis in integers(scatter, "update_window_dims"))
            rows = count // max(row, 1)
            return CacheUpdates(sectors=size // _SECTOR_BYTES, requests=rows * ceil(size / max(rows, 1) / _LINE_BYTES))
    return CacheUpdates()


def sums_columns(instructions: Mapping[str, Instruction]) -> bool:
    """Whether a kernel's longest reduction keeps what lies side by side, at least a warp's elements of 16 bits.

    Of 32 bits, enough bytes are on their way: sums over columns of float32 reach the whole bandwidth.
    """
    given = max(
        (each.shape for each in instructions.values() if each.opcode == "parameter"),
        key=lambda shape: shape.element_count,
        default=None,
    )
    if given is None or given.byte_size > 2 * given.element_count:
        return False
    sums = [each for each in instructions.values() if each.opcode == "reduce" and each.operands[0] in instructions]
    longest = max(sums, key=lambda each: instructions[each.operands[0]].shape.element_count, default=None)
    if longest is None:
        return False
    operand, summed = instructions[longest.operands[0]].shape, integers(longest, "dimensions")
    kept = takewhile(lambda axis: axis not in summed, operand.minor_to_major)
    return prod(operand.dimensions[axis] for axis in kept) >= _WARP


def executed_share(instructions: Mapping[str, Instruction]) -> float:
    """Returns the share of its instructions that a warp runs, of a kernel that joins arrays.

    Each operand is a branch, and a warp takes those whose elements it has: few where the parts are long.
    """
    shares = [1.0]
    for join in instructions.values():
        if join.opcode == "concatenate" and len(join.operands) > 1:
            (axis,) = integers(join, "dimensions")
            parts, run = len(join.operands), prod(join.shape.dimensions[axis:])
            shares.append((1 + _WARP_SPAN * parts / run) / parts)
    return min(shares)


def _is_one_value(instructions: Mapping[str, Instruction], name: str) -> bool:
    """Whether all elements of an array are one constant."""
    instruction = instructions.get(name)
    while instruction is not None and instruction.opcode in _VIEWS:
        instruction = instructions.get(instruction.operands[0])
    return instruction is not None and instruction.opcode == "constant" and instruction.shape.element_count == 1


def loads_slowly(instructions: Mapping[str, Instruction]) -> bool:
    """Whether a fused product has an operand whose rows start where a thread cannot load 16 bytes at once.

    Rows that start at multiples of 4 or 8 bytes are slow only where a product of 16-bit elements sums along them:
    other operands are copied to shared memory asynchronously, in words of 4 bytes.
    """
    return any(
        name in instructions and _is_slow(instructions[name].shape, integers(product, f"{side}_contracting_dims"))
        for product in instructions.values()
        if product.opcode == "dot"
        for name, side in zip(product.operands, ("lhs", "rhs"), strict=True)
    )


def has_unaligned_rows(kind: str, operands: Sequence[Shape], result: Shape) -> bool:
    """Whether a product writes rows of 16-bit elements that a thread cannot store 16 bytes at once.

    A library's product also reads such rows slowly; of what Triton's loads, `loads_slowly` knows more.
    """
    if kind not in ("cublas", "cublaslt", "triton_gemm"):
        return False
    read = () if kind == "triton_gemm" else operands
    shapes = (*read, *(shape for _, shape in leaves(result)))
    return any(shape.element_bytes == 2 and _is_slow(shape, (_fastest(shape),)) for shape in shapes)


def is_transposed(product: Instruction, operands: Sequence[Shape]) -> bool:
    """Whether no operand of a library's product of float32 is contiguous along the sum.

    Hopper's matrix units read such operands from shared memory if they have 16 bits, but not if they have 32; one of
    the two can come from registers.
    """
    numbers = dot_dimensions(product) if product.opcode == "custom-call" else None
    if numbers is None or len(operands) < 2 or operands[0].element_type != "f32":
        return False
    sums = zip(operands, (numbers.lhs_contracting, numbers.rhs_contracting), strict=False)
    return all(_fastest(shape) not in axes for shape, axes in sums)


def filter_channels(call: Instruction, operands: Sequence[Shape]) -> int:
    """Returns how many input channels each filter of a cuDNN convolution has; 0 for anything else.

    The gradient of a filter is padded alike, but one of a single channel has a kernel of its own, and 0.
    """
    labels, target = convolution_labels(call), custom_call_target(call)
    if labels is None or not target.startswith("__cudnn$conv"):
        return 0
    if target.startswith(_FORWARD_CONVOLUTIONS):
        return operands[1].dimensions[labels[1].index("i")]
    channels = next(leaves(call.shape))[1].dimensions[labels[1].index("i")]
    return channels if channels > 1 else 0


def filled_tiles(call: Instruction, core_count: int) -> float:
    """Returns the share of a cuDNN convolution's tiles and of the multiprocessors that have something to compute.

    Its results are the rows and columns of a product, channels the columns. The gradient of a filter splits its sum, so
    that there are tiles for all multiprocessors.
    """
    labels, target = convolution_labels(call), custom_call_target(call)
    if labels is None or not target.startswith("__cudnn$conv"):
        return 1.0
    result = next(leaves(call.shape))[1]
    if target == "__cudnn$convBackwardFilter":
        columns, rows = result.dimensions[labels[1].index("o")], 0
    else:
        data = labels[0] if target == "__cudnn$convBackwardInput" else labels[2]
        columns = result.dimensions[data.index("f")]
        rows = result.element_count // columns
    across = ceil(columns / _TILE)
    busy = min(1.0, across * ceil(rows / _TILE) / core_count) if rows and core_count else 1.0
    return busy * columns / (across * _TILE)


def _is_slow(shape: Shape, contracting: Sequence[int]) -> bool:
    """Whether an operand's rows are not aligned for wide loads."""
    if sum(size > 1 for size in shape.dimensions) < 2:
        return False
    width = shape.element_bytes
    row = shape.dimensions[_fastest(shape)] * width
    return bool(row % (ALIGNED_BYTES if width == 2 and _fastest(shape) in contracting else _WORD_BYTES))


def _fastest(shape: Shape) -> int:
    """Returns the dimension whose elements lie side by side; those of size 1 do not count."""
    return next((axis for axis in shape.minor_to_major if shape.dimensions[axis] > 1), -1)
