"""Finds in-place updates in a fused computation: chains from a result back to the parameter that it updates."""

from __future__ import annotations

from hlo_analysis.hlo import Computation, Instruction, Module
from hlo_analysis.program.dataflow import VIEWS, Path, roots


def scatter_inputs(instruction: Instruction) -> int:
    """Returns how many arrays a scatter updates."""
    return (len(instruction.operands) - 1) // 2


def in_place_base(body: Computation, instruction: Instruction) -> tuple[Instruction, int] | None:
    """Follows a chain of in-place updates back to the updated parameter, and counts the bytes that the chain writes."""
    written = 0
    while True:
        if instruction.opcode in VIEWS:
            instruction = body.instructions[instruction.operands[0]]
        elif instruction.opcode == "dynamic-update-slice":
            written += body.instructions[instruction.operands[1]].shape.byte_size
            instruction = body.instructions[instruction.operands[0]]
        elif instruction.opcode == "scatter" and scatter_inputs(instruction) == 1:
            written += body.instructions[instruction.operands[2]].shape.byte_size
            instruction = body.instructions[instruction.operands[0]]
        else:
            return (instruction, written) if written and instruction.opcode == "parameter" else None


def in_place_chain(body: Computation) -> frozenset[str]:
    """Returns the names of the instructions on chains of in-place updates that end in a root."""
    names: set[str] = set()
    for _, root in roots(body):
        if in_place_base(body, root):
            while root.opcode != "parameter":
                names.add(root.name)
                root = body.instructions[root.operands[0]]
    return frozenset(names)


def updated_operand(module: Module, instruction: Instruction, path: Path) -> int | None:
    """Returns the number of the operand that this leaf of the result updates in place, or None if the buffer is new."""
    if instruction.opcode == "dynamic-update-slice" or (
        instruction.opcode == "scatter" and scatter_inputs(instruction) == 1
    ):
        return 0
    if instruction.opcode == "fusion":
        body = module.computations[instruction.called[0]]
        for place, root in roots(body):
            if place == path and (base := in_place_base(body, root)):
                return int(base[0].literal or 0)
    return None
