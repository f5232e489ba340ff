"""Counts the bytes that an instruction of the final module reads and writes, and what its parts would move unfused.

All rules count from shapes:

- A launch reads each operand once, as a whole. Where slices, dynamic slices or gathers stand between an operand and the
  fusion's results, it reads only what those need (`demand.py`). A launch writes its results. A dynamic-update-slice or
  scatter that updates its operand in place writes only the update and does not read the rest. It writes at most the
  whole buffer: a scatter that sums many updates does so in the cache.
- *Unfused* means the same instructions, each as its own launch. Bitcasts, reshapes, tuples and inner broadcasts are
  views and free. (The count is therefore low: an eager framework copies at least some of them.) Constants and iotas are
  free as operands. The results of a fusion are written even where they are views.
- Scratch memory of a library call (the last s8/u8 vector of its result) does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from hlo_analysis.hlo import Computation, Instruction, Module, Shape
from hlo_analysis.hlo.attributes import custom_call_target, gemm_config
from hlo_analysis.program.dataflow import STARTED, VIEWS, Path, behind_aliases, leaf_shape, leaves, roots
from hlo_analysis.program.demand import needed_elements
from hlo_analysis.program.inplace_updates import in_place_base, scatter_inputs
from hlo_analysis.records import LaunchKind

_FREE = frozenset({"parameter", "constant", "iota", "tuple", "get-tuple-element", "broadcast"})
_LIBRARY_TARGETS = ("__cublas$", "__cudnn$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes of one launch: `reads` by operand position and leaf, `writes` by leaf of the result.

    Position -1 means the instruction's own result, which a later pass over it reads back.
    """

    reads: dict[tuple[int, Path], int]
    writes: dict[Path, int]
    unfused_bytes: int

    @property
    def bytes_read(self) -> int:
        """Returns the total bytes read."""
        return sum(self.reads.values())

    @property
    def bytes_written(self) -> int:
        """Returns the total bytes written."""
        return sum(self.writes.values())


def is_library_call(instruction: Instruction) -> bool:
    """Whether the instruction calls cuBLAS or cuDNN."""
    return instruction.opcode == "custom-call" and custom_call_target(instruction).startswith(_LIBRARY_TARGETS)


def result_leaves(instruction: Instruction) -> list[tuple[Path, Shape]]:
    """Returns the leaves of the result that an instruction writes.

    They exclude a library call's scratch memory and the operand in the result of an asynchronous start.
    """
    found = list(leaves(instruction.shape))
    if instruction.opcode in STARTED and instruction.shape.is_tuple:
        return [(path, shape) for path, shape in found if path[0] == STARTED[instruction.opcode]]
    if is_library_call(instruction) and len(found) > 1:
        last = found[-1][1]
        if last.element_type in ("s8", "u8") and len(last.dimensions) == 1:
            found.pop()
    return found


def usage_of(module: Module, computation: Computation, instruction: Instruction) -> Usage:
    """Counts what one instruction of `computation` reads, writes, and would move with each part as its own launch."""
    operands = [computation.instructions[name] for name in instruction.operands]
    if instruction.opcode == "fusion":
        body = module.computations[instruction.called[0]]
        writes = _fusion_writes(module, body)
        needed = needed_elements(module, body)
        reads = {
            (position, path): _parameter_reads(body, parameter, path, needed)
            for position, parameter in enumerate(body.parameters)
            for path, _ in leaves(parameter.shape)
        }
        return Usage(reads=reads, writes=writes, unfused_bytes=_unfused(module, body))
    reads = {
        (position, path): _operand_reads(instruction, position, shape)
        for position, operand in enumerate(operands)
        for path, shape in leaves(operand.shape)
    }
    # An operand that occurs twice is one buffer, read once.
    first: dict[str, int] = {}
    for position, name in enumerate(instruction.operands):
        if first.setdefault(name, position) != position:
            reads = {key: (0 if key[0] == position else value) for key, value in reads.items()}
    writes = {path: _result_writes(instruction, shape, operands) for path, shape in result_leaves(instruction)}
    moved = sum(reads.values()) + sum(writes.values())
    return Usage(reads=reads, writes=writes, unfused_bytes=moved + library_extra(instruction, operands))


def pass_usage(whole: Usage, instruction: Instruction, kind: LaunchKind, step: int, steps: int) -> Usage:
    """Returns the usage of one launch of an instruction that needs several: a copy, a memset, or a pass of a sort.

    A copy moves one result; a memset writes all of them; a later pass of a sort reads and writes the results in place;
    any other pass does what the instruction does.
    """
    if steps == 1:
        return whole
    results = [(path, shape.byte_size) for path, shape in result_leaves(instruction)]
    if kind == "copy" and results:
        path, size = results[min(step, len(results) - 1)]
        read = next((key for key, value in whole.reads.items() if value == size), (-1, path))
        return Usage(reads={read: size}, writes={path: size}, unfused_bytes=2 * size)
    if kind == "memset":
        return Usage(reads={}, writes=dict(results), unfused_bytes=sum(size for _, size in results))
    if kind == "sort" and step > 0:
        moved = 2 * sum(size for _, size in results)
        return Usage(reads={(-1, path): size for path, size in results}, writes=dict(results), unfused_bytes=moved)
    return whole


def library_extra(instruction: Instruction, operands: list[Instruction]) -> int:
    """Counts the bytes that a library call saves by fusing its epilogue or softmax."""
    found = result_leaves(instruction) if is_library_call(instruction) else []
    if not found:
        return 0
    out = found[0][1].byte_size
    if gemm := gemm_config(instruction):
        epilogue = gemm.get("epilogue", "DEFAULT")
        # Each step that follows (accumulation, bias, activation) would read the product and write it back.
        activation = any(name in epilogue for name in ("GELU", "RELU", "SILU"))
        return 2 * out * ((gemm.get("beta", 0) != 0) + ("BIAS" in epilogue) + activation)
    if attention := instruction.backend_config.get("cudnn_fmha_backend_config"):
        scores = _scores_bytes(attention, operands[0].shape)
        # Forward: scores written and read, probabilities written and read. Backward: scores written, softmax reads and
        # writes, the value gradient reads; probability gradient written; softmax gradient reads two and writes one;
        # query and key gradients read one each.
        return scores * (10 if "Backward" in custom_call_target(instruction) else 4)
    return 0


def _scores_bytes(attention: dict, query: Shape) -> int:
    sizes = (attention.get("intermediate_tensor_shape") or {}).get("dimensions", ())
    return prod(map(int, sizes)) * query.element_bytes if sizes else 0


def _operand_reads(instruction: Instruction, position: int, shape: Shape) -> int:
    """Returns the bytes of one operand that an unfused instruction reads."""
    match instruction.opcode:
        case "slice" | "dynamic-slice" | "gather" if position == 0:
            return min(shape.byte_size, instruction.shape.byte_size)
        case "dynamic-update-slice" if position == 0:
            return 0
        case "parameter" | "constant" | "iota" | "get-tuple-element" | "tuple" | "bitcast":
            return 0
    return shape.byte_size


def _result_writes(instruction: Instruction, shape: Shape, operands: list[Instruction]) -> int:
    """Returns the bytes of one leaf of its result that an unfused instruction writes."""
    match instruction.opcode:
        case "dynamic-update-slice":
            return operands[1].shape.byte_size
        case "scatter":
            count = scatter_inputs(instruction)
            return min(sum(update.shape.byte_size for update in operands[count + 1 :]) // count, shape.byte_size)
    return shape.byte_size


def _fusion_writes(module: Module, body: Computation) -> dict[Path, int]:
    writes: dict[Path, int] = {}
    for prefix, root in roots(body):
        base = in_place_base(body, root)
        if base is not None:
            writes[prefix] = min(base[1], root.shape.byte_size)
        elif root.opcode == "fusion":
            inner = _fusion_writes(module, module.computations[root.called[0]])
            writes.update({(*prefix, *path): count for path, count in inner.items()})
        else:
            writes.update({(*prefix, *path): shape.byte_size for path, shape in leaves(root.shape)})
    return writes


def _parameter_reads(body: Computation, parameter: Instruction, path: Path, needed: Mapping[str, int]) -> int:
    shape = leaf_shape(parameter.shape, path)
    if path:
        return shape.byte_size if body.users(parameter.name) else 0
    return -(-shape.byte_size * needed[parameter.name] // max(shape.element_count, 1))


def _unfused(module: Module, body: Computation) -> int:
    """Counts the bytes moved if each instruction of a fused computation were its own launch."""
    total = 0
    for instruction in body.instructions.values():
        if instruction.opcode in _FREE or instruction.opcode in VIEWS:
            continue
        if instruction.opcode == "fusion":
            total += _unfused(module, module.computations[instruction.called[0]])
            continue
        operands = [body.instructions[name] for name in instruction.operands]
        total += sum(_result_writes(instruction, shape, operands) for _, shape in leaves(instruction.shape))
        total += _instruction_reads(body, instruction)
    # Each result must be written, even if it is a view, and once for each time it is returned.
    written: set[str] = set()
    for _, root in roots(body):
        shown = behind_aliases(body, root)
        if shown.opcode == "parameter":
            total += 2 * root.shape.byte_size
        elif shown.opcode in ("constant", "iota", "broadcast") or shown.name in written:
            total += _instruction_reads(body, shown) + root.shape.byte_size
        elif shown.opcode in ("dynamic-update-slice", "scatter") and in_place_base(body, root) is None:
            total += root.shape.byte_size
        written.add(shown.name)
    return total


def _instruction_reads(body: Computation, instruction: Instruction) -> int:
    """Counts the bytes that a fused instruction would read unfused, following views, each buffer once."""
    reads: dict[tuple[str, Path], int] = {}
    for position, name in enumerate(instruction.operands):
        shown, path, broadcast = _through_views(body, body.instructions[name])
        if shown.opcode in ("constant", "iota"):
            continue
        whole = leaf_shape(shown.shape, path).byte_size
        scatter_base = instruction.opcode == "scatter" and position < scatter_inputs(instruction)
        if scatter_base:
            count = scatter_inputs(instruction)
            moved = body.instructions[instruction.operands[count + 1 + position]].shape.byte_size
        else:
            moved = _operand_reads(instruction, position, body.instructions[name].shape)
            moved = whole if broadcast and moved else min(moved, whole)
        reads[shown.name, path] = max(moved, reads.get((shown.name, path), 0))
    return sum(reads.values())


def _through_views(body: Computation, instruction: Instruction) -> tuple[Instruction, Path, bool]:
    """Follows views from an instruction to the one whose bytes they show.

    Returns that instruction, the leaf of it, and whether a broadcast was on the way.
    """
    path: Path = ()
    broadcast = False
    while True:
        if instruction.opcode in VIEWS:
            instruction = body.instructions[instruction.operands[0]]
        elif instruction.opcode == "broadcast":
            instruction, broadcast = body.instructions[instruction.operands[0]], True
        elif instruction.opcode == "get-tuple-element":
            path = (int(instruction.attributes["index"]), *path)
            instruction = body.instructions[instruction.operands[0]]
        elif instruction.opcode == "tuple" and path:
            instruction, path = body.instructions[instruction.operands[path[0]]], path[1:]
        else:
            return instruction, path, broadcast
