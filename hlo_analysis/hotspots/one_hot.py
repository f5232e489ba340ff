"""Recognizes products with a one-hot matrix that only move rows, as experts with a static capacity dispatch tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hlo_analysis.hlo import Instruction
from hlo_analysis.patterns.launch_patterns import is_product
from hlo_analysis.program.facts import LaunchRow, maker

_LAYOUTS = ("bitcast", "broadcast", "convert", "copy", "reshape", "transpose")
_MOST_LAUNCHES = 2
"""That an operand is followed back through: one writes the matrix, and another may write what it is compared with."""


def one_hot_elements(product: LaunchRow, launches: Sequence[LaunchRow]) -> int:
    """Returns the elements of the largest operand that is one-hot, or a multiple of one; 0 if there is none."""
    calls = product.facts.of("dot") or [each for each in (product.facts.launched,) if each]
    operands = [_Place(call, product, 0).operand(n, launches) for call in calls for n in range(len(call.operands[:2]))]
    found = [each.instruction.shape.element_count for each in operands if each and _is_one_hot(each, launches)]
    return max(found, default=0)


@dataclass(frozen=True)
class _Place:
    """An instruction, and how many launches it is before the product."""

    instruction: Instruction
    launch: LaunchRow
    launches_before: int

    def operand(self, number: int, launches: Sequence[LaunchRow]) -> _Place | None:
        """Returns what computes an operand, in this launch or in the one that writes it."""
        name, facts = self.instruction.operands[number], self.launch.facts
        if name in facts.instructions and name not in facts.parameters:
            return _Place(facts.instructions[name], self.launch, self.launches_before)
        producer, made = maker(self.launch, name, launches) or (None, None)
        if producer is None or made is None or self.launches_before == _MOST_LAUNCHES or is_product(producer):
            return None
        return _Place(made, producer, self.launches_before + 1)


def _is_one_hot(place: _Place, launches: Sequence[LaunchRow]) -> bool:
    """Returns whether an array is zero except where positions along an axis equal given ones."""
    found = place.instruction
    inner = [place.operand(number, launches) for number in range(len(found.operands))]
    if found.opcode == "compare":
        return found.attributes.get("direction") == "EQ" and any(
            each and _is_position(each, launches) for each in inner
        )
    if found.opcode == "select":
        predicate, _, other = inner
        return bool(predicate and other and _is_one_hot(predicate, launches) and _is_zero(other))
    if found.opcode in ("multiply", "and"):
        return any(each and _is_one_hot(each, launches) for each in inner)
    return found.opcode in _LAYOUTS and inner[0] is not None and _is_one_hot(inner[0], launches)


def _is_position(place: _Place, launches: Sequence[LaunchRow]) -> bool:
    found = place.instruction
    inner = place.operand(0, launches) if found.opcode in _LAYOUTS else None
    return found.opcode == "iota" or (inner is not None and _is_position(inner, launches))


def _is_zero(place: _Place) -> bool:
    found = place.instruction
    constant = place.launch.facts.operand(found, 0) if found.opcode == "broadcast" else found
    return constant is not None and constant.opcode == "constant" and constant.literal in ("0", "-0")
