"""Traces each launch of the final module back to the instructions that existed right after priority fusion.

Later passes rename fusions, merge siblings, wrap single operations, and replace Triton matrix products by library
calls. The names inside fused computations survive these passes, so they identify where a launch came from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from hlo_analysis.decisions.edges import executed_computations, launch_edges
from hlo_analysis.hlo import Instruction, Module, Shape

_NO_WORK = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast"))

Origins = Mapping[str, tuple[str, ...]]


def origins(stages: Sequence[Module]) -> Origins:
    """Maps each instruction of the last module to the instructions of the first module that it came from.

    Instructions without a known origin are absent.

    Args:
        stages: one module at several passes, oldest first. Two neighbours that differ only by `rename_fusions` are
            matched by position. More stages make the match more reliable.
    """
    known: dict[str, tuple[str, ...]] = {name: (name,) for name in _executed(stages[0])}
    for older, newer in pairwise(stages):
        step = _by_position(older, newer) or _by_content(older, newer)
        known = {
            name: tuple(dict.fromkeys(first for middle in middles for first in known.get(middle, ())))
            for name, middles in step.items()
        }
    return {name: found for name, found in known.items() if found}


def stem(name: str) -> str:
    """Removes the number that cloning appends to a name: 'mul.20.3' → 'mul.20'."""
    head, _, tail = name.rpartition(".")
    return head if head and tail.isdigit() else name


def working(module: Module) -> frozenset[str]:
    """Returns the executed instructions that do work: all except parameters, constants, tuples and bitcasts."""
    return frozenset(i.name for i in _executed(module).values() if i.opcode not in _NO_WORK)


def contents(module: Module, instruction: Instruction) -> tuple[Instruction, ...]:
    """Returns the instructions that a fusion computes, without parameters, constants and bitcasts.

    For any other instruction it returns the instruction itself.
    """
    if instruction.opcode != "fusion":
        return (instruction,)
    fused = module.computations[instruction.called[0]]
    return tuple(inner for inner in fused.instructions.values() if inner.opcode not in _NO_WORK)


def _uncloned(name: str) -> str:
    """Returns the name that an instruction had before its kernel was merged: 'cosine.2.clone.1' → 'cosine.2'."""
    return name.partition(".clone")[0]


def _likeness(instruction: Instruction) -> tuple[str, str, Shape, str]:
    """Returns the properties that a clone shares with its original."""
    return stem(instruction.name), instruction.opcode, instruction.shape, instruction.op_name


def _executed(module: Module) -> dict[str, Instruction]:
    return {
        name: instruction
        for computation in executed_computations(module)
        for name, instruction in computation.instructions.items()
    }


def _by_position(older: Module, newer: Module) -> dict[str, tuple[str, ...]] | None:
    """Pairs instructions by order if the two modules differ only in names; returns None if they differ in more."""
    before, after = list(_executed(older).values()), list(_executed(newer).values())
    if [(i.opcode, i.shape, len(i.operands)) for i in before] != [(i.opcode, i.shape, len(i.operands)) for i in after]:
        return None
    return {new.name: (old.name,) for old, new in zip(before, after, strict=True)}


def _by_content(older: Module, newer: Module) -> dict[str, tuple[str, ...]]:
    before, after = _executed(older), _executed(newer)
    holders: dict[str, list[str]] = defaultdict(list)
    likes: dict[tuple[str, str, Shape, str], list[str]] = defaultdict(list)
    plain: dict[tuple[str, str], list[str]] = defaultdict(list)
    for old in before.values():
        for inner in contents(older, old):
            holders[inner.name].append(old.name)
            likes[_likeness(inner)].append(old.name)
        if old.opcode != "fusion":
            plain[stem(old.name), old.opcode].append(old.name)

    matched: dict[str, tuple[str, ...]] = {}
    for new in after.values():
        if (same := before.get(new.name)) and same.opcode == new.opcode and same.shape == new.shape:
            matched[new.name] = (new.name,)
        elif new.opcode == "fusion":
            found = [
                name
                for inner in contents(newer, new)
                for name in holders.get(_uncloned(inner.name)) or plain.get((stem(inner.name), inner.opcode), ())
            ]
            if found:
                matched[new.name] = tuple(dict.fromkeys(found))
    _match_calls(older, newer, matched)
    for new in after.values():
        if new.opcode == "fusion" and new.name not in matched:
            # A clone whose inner instructions were renumbered: match it only where the match is unambiguous.
            alike = [likes[_likeness(inner)] for inner in contents(newer, new)]
            if found := [names[0] for names in alike if len(names) == 1]:
                matched[new.name] = tuple(dict.fromkeys(found))
    _match_leftovers(newer, matched)
    return matched


def _match_calls(older: Module, newer: Module, matched: dict[str, tuple[str, ...]]) -> None:
    """Matches the library calls that replaced Triton matrix products.

    Such a call keeps the size of the product, usually its op name, and its users.
    """
    before, after = _executed(older), _executed(newer)
    taken = {name for names in matched.values() for name in names}
    free = [i for i in before.values() if i.opcode in ("fusion", "custom-call", "dot") and i.name not in taken]
    users_before, _ = _neighbours(older)
    users_after, _ = _neighbours(newer)
    for new in after.values():
        if new.name in matched or new.opcode != "custom-call":
            continue
        users = {name for user in users_after[new.name] for name in matched.get(user, ())}
        same_size = [old for old in free if _first(old.shape).element_count == _first(new.shape).element_count]
        scores = [(old.op_name == new.op_name) + 2 * len(users & users_before[old.name]) for old in same_size]
        if scores and max(scores) > 0:
            best = same_size[scores.index(max(scores))]
            matched[new.name] = (best.name,)
            free.remove(best)


def _match_leftovers(newer: Module, matched: dict[str, tuple[str, ...]]) -> None:
    """Matches the prologues and epilogues that a library call could not keep.

    Each is a launch of its own without a known origin. It came from the same matrix product as the library call.
    """
    after = _executed(newer)
    users_after, operands_after = _neighbours(newer)
    for new in after.values():
        if new.name in matched or new.opcode != "fusion":
            continue
        for around in (users_after[new.name], operands_after[new.name]):
            calls = [name for name in around if after[name].opcode == "custom-call" and name in matched]
            if len(calls) == 1:
                matched[new.name] = matched[calls[0]]
                break


def _first(shape: Shape) -> Shape:
    return shape.elements[0] if shape.elements else shape


def _neighbours(module: Module) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Returns the users and operands of each working instruction, looking through bitcasts and tuples."""
    users: dict[str, set[str]] = defaultdict(set)
    operands: dict[str, set[str]] = defaultdict(set)
    for edge in launch_edges(module, working(module)):
        users[edge.producer].add(edge.consumer)
        operands[edge.consumer].add(edge.producer)
    return users, operands
