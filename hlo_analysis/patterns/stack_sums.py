"""Finds stacks that a loop leaves, of which nothing but a reduction over the loop's steps is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from hlo_analysis.hlo import Instruction
from hlo_analysis.hlo.attributes import dot_dimensions, integers
from hlo_analysis.patterns.launch_patterns import OF_OTHER_ELEMENTS, shape_of
from hlo_analysis.program.facts import LaunchFacts, LaunchRow

Readers = Mapping[int, Sequence[LaunchRow]]
"""The launches that read the results of each launch, by its index."""


def reducers(readers: Readers, stack: LaunchRow) -> list[LaunchRow]:
    """Returns the launches that reduce a stack over the steps, or take the last step; none if others read it, too.

    Element-wise launches may come first, since each step can do their work. A reduction that needs another one of the
    same stack, as a variance needs the mean, cannot run along with the loop.

    Args:
        readers: of the whole program.
        stack: the loop's launch that writes a part of the stack in each step.
    """
    steps = shape_of(stack.outputs[0].shape).dimensions[:1]
    found: dict[int, LaunchRow] = {}
    queue, seen = [stack], {stack.index}
    while queue:
        source = queue.pop()
        users = [user for user in readers.get(source.index, ()) if user is not stack]
        for user in users:
            is_reduced, is_passed = _use(user.facts, source.name, prod(steps))
            if user.repeat >= stack.repeat or not (is_reduced or is_passed):
                return []
            found |= {user.index: user} if is_reduced else {}
            queue += [user] if is_passed and user.index not in seen else []
            seen.add(user.index)
        if not users:
            return []
    return [] if _needs(readers, found.values(), seen) else list(found.values())


def _needs(readers: Readers, sums: Collection[LaunchRow], stack_readers: Collection[int]) -> bool:
    """Whether a launch that reads the stack also reads what was made of one of its sums."""
    queue, seen = list(sums), set[int]()
    while queue:
        new = [user for user in readers.get(queue.pop().index, ()) if user.index not in seen]
        seen.update(user.index for user in new)
        queue += new
    return not seen.isdisjoint(stack_readers)


def _use(facts: LaunchFacts, stack: str, steps: int) -> tuple[bool, bool]:
    """Whether a launch reduces a stack over its steps, and whether it returns something as large, element by element.

    Both are False if it does anything else with the stack.
    """
    whole = {name for name, value in facts.parameters.items() if value.partition("#")[0] == stack}
    sums: set[str] = set()
    is_reduced = False
    for found in facts.instructions.values():
        if found.opcode == "tuple" or not whole.intersection(found.operands):
            sums |= {found.name} if sums.intersection(found.operands) else set()
            continue
        if sums.intersection(found.operands):  # as a deviation from the mean
            return False, False
        if _reduces_steps(facts, found, whole, steps):
            is_reduced = True
            sums.add(found.name)
        elif found.opcode in OF_OTHER_ELEMENTS or found.opcode == "broadcast":
            return False, False
        else:
            whole.add(found.name)
    root = facts.root
    results = set(root.operands if root and root.opcode == "tuple" else [root.name] if root else [])
    return is_reduced, not whole.isdisjoint(results)


def _reduces_steps(facts: LaunchFacts, found: Instruction, whole: Collection[str], steps: int) -> bool:
    """Whether an instruction reduces or multiplies over the axis of steps, or takes the last of them."""
    number = next(number for number, name in enumerate(found.operands) if name in whole)
    operand = facts.operand(found, number)
    if operand is None or not operand.shape.dimensions:
        return False
    sizes = operand.shape.dimensions
    if found.opcode == "slice":
        return found.shape.dimensions[0] == 1 and integers(found, "slice")[0] == sizes[0] - 1
    if found.opcode == "reduce":
        axes = integers(found, "dimensions")
    else:
        dimensions = dot_dimensions(found)
        axes = () if dimensions is None else (dimensions.lhs_contracting, dimensions.rhs_contracting)[number]
    # XLA cuts a long axis in two, and reduces one after the other.
    of_steps = {axis for axis in range(len(sizes)) if prod(sizes[: axis + 1]) <= steps}
    return not of_steps.isdisjoint(axes)
