"""Finds in-place updates in a fused computation: chains from a result back to the parameter that they update."""

from __future__ import annotations

from hlo_analysis.hlo import Computation, Instruction, Module
from hlo_analysis.program.dataflow import VIEWS, Path


def scatter_inputs(instruction: Instruction) -> int:
    """How many arrays a scatter updates."""
    return (len(instruction.operands) - 1) // 2


def in_place_base(body: Computation, instruction: Instruction) -> tuple[Instruction, int] | None:
    """Follow a chain of in-place updates back to the parameter it updates, and count the bytes written on the way."""
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


def roots(body: Computation) -> list[tuple[Path, Instruction]]:
    """What a fusion returns: the elements of its root tuple, or the root."""
    root = body.root_instruction
    if root.opcode == "tuple":
        return [((index,), body.instructions[name]) for index, name in enumerate(root.operands)]
    return [((), root)]


def in_place_chain(body: Computation) -> frozenset[str]:
    """Names on the chains of in-place updates that end in a root."""
    names: set[str] = set()
    for _, root in roots(body):
        if in_place_base(body, root):
            while root.opcode != "parameter":
                names.add(root.name)
                root = body.instructions[root.operands[0]]
    return frozenset(names)


def updated_operand(module: Module, instruction: Instruction, path: Path) -> int | None:
    """The operand whose buffer holds this leaf of the result, and is updated there; None where the result is new."""
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
