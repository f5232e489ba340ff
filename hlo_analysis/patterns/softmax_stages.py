"""Follows scores through launches to the probabilities that a softmax makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from hlo_analysis.hlo import Instruction
from hlo_analysis.program.facts import LaunchFacts

_MOVES = frozenset(("bitcast", "bitcast-convert", "broadcast", "concatenate", "convert", "copy", "dynamic-slice", "pad",
                    "reshape", "slice", "transpose"))  # fmt: skip
_SCALES = _MOVES | {"multiply", "divide", "select"}
_MASKS = _SCALES | {"add", "subtract", "maximum", "minimum", "clamp", "tanh", "negate"}


class Stage(IntEnum):
    """How far an array is on the way from scores to probabilities."""

    SCORE = 1
    """Scores, scaled, capped, masked or biased."""
    SHIFTED = 2
    """Less a number for each row, as its maximum or the logarithm of its sum."""
    PROBABILITY = 3
    """The exponential of that, scaled: divided by the row's sum or not, with elements dropped or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """What a launch makes of scores.

    stage: the furthest that an instruction of it comes, of arrays as large as the scores; None where none is of scores.
    result: the stage of what it returns.
    sums: whether it adds up probabilities, as a softmax does a row's.
    """

    stage: Stage | None
    result: Stage | None
    sums: bool


def follow(facts: LaunchFacts, given: Mapping[str, Stage]) -> Flow:
    """Follows scores through a launch. given: stages of its inputs, by name."""
    if not facts.parameters:  # a copy, a library's product, or a lone reduction
        stage = max(given.values(), default=None)
        return Flow(stage=stage, result=stage, sums=stage is Stage.PROBABILITY and bool(facts.of("reduce")))
    stages: dict[str, Stage] = {}
    for name, found in facts.instructions.items():
        passed = facts.parameters.get(name)
        stage = _stage(facts, found, stages) if passed is None else given.get(passed)
        if stage is not None:
            stages[name] = stage
    sums = any(stages.get(found.operands[0]) is Stage.PROBABILITY for found in facts.of("reduce"))
    root = facts.root
    returned = root.operands if root and root.opcode == "tuple" else (root.name,) if root else ()
    result = max((stages[name] for name in returned if name in stages), default=None)
    return Flow(stage=max(stages.values(), default=None), result=result, sums=sums)


def _stage(facts: LaunchFacts, found: Instruction, stages: Mapping[str, Stage]) -> Stage | None:
    """The stage of an instruction's result, given those of its operands."""
    operands = [stages.get(name) for name in found.operands]
    stage = max((operand for operand in operands if operand is not None), default=None)
    if found.opcode == "exponential":
        return Stage.PROBABILITY if stage is Stage.SHIFTED else None
    if found.opcode == "subtract" and operands[0] is Stage.SCORE and _is_of_rows(facts, found.operands[1]):
        return Stage.SHIFTED
    if found.opcode == "select" and not all(
        operand is not None or _is_constant(facts, name)
        for operand, name in zip(operands[1:], found.operands[1:], strict=True)
    ):
        return None  # what is put beside them is of another origin
    if found.opcode in _SCALES:
        return stage
    return Stage.SCORE if found.opcode in _MASKS and stage is Stage.SCORE else None


def _is_of_rows(facts: LaunchFacts, name: str) -> bool:
    """Whether an array has one number for each row."""
    found = _source(facts, name)
    return found is not None and found.opcode == "broadcast" and not _is_constant(facts, name)


def _is_constant(facts: LaunchFacts, name: str) -> bool:
    """Whether an array has one value everywhere, which the program states."""
    found = _source(facts, name)
    while found is not None and found.opcode == "broadcast":
        found = _source(facts, found.operands[0])
    return found is not None and found.opcode == "constant"


def _source(facts: LaunchFacts, name: str) -> Instruction | None:
    """The instruction behind casts and changes of shape."""
    found = facts.instructions.get(name)
    while found is not None and found.opcode in ("bitcast", "convert", "reshape", "copy"):
        found = facts.instructions.get(found.operands[0])
    return found
