"""Counts the elements of each instruction that a fusion computes, propagated from its results to its parameters.

XLA's emitters compute a fusion from its results backwards, so that what stands before a slice is done for the slice
alone: of `norm(x)[:, -1]` one row a batch is read. A need is so many indices of each dimension; which ones is not
followed, but needs that come by way of different slices are kept apart and add up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from hlo_analysis.hlo import Computation, Instruction, Module
from hlo_analysis.hlo.attributes import integers
from hlo_analysis.program.dataflow import VIEWS
from hlo_analysis.program.inplace_updates import in_place_chain

Way = tuple[str, ...]
"""The slices between a value and the results, the nearest to the value first."""

Needs = dict[Way, tuple[int, ...]]
"""By the way that a need comes: so many indices of each dimension."""

_ELSEWHERE = frozenset({"slice", "dynamic-slice", "gather", "reverse"})
"""Opcodes that show other places of their operand."""

_NOT_POINTWISE = frozenset(
    {
        *("dot", "scaled-dot", "convolution", "custom-call", "sort", "fft", "cholesky", "triangular-solve"),
        *("reduce-window", "select-and-scatter", "rng-bit-generator", "batch-norm-training", "batch-norm-grad"),
    }
)
"""Opcodes of which an element of the result takes more than its like of an operand, though their shapes be equal."""

# Needs are no longer told apart beyond so many ways (a scan of log2(n) steps has two slices a step).
_MOST_WAYS = 16


def needed_elements(module: Module, body: Computation) -> dict[str, int]:
    """Elements of each instruction of a fused computation that are made, or read of a parameter.

    None of a chain of in-place updates that ends in a result: what it does not replace stays where it is.
    """
    needs = _needs(module, body, None, in_place_chain(body))
    return {name: _count(body.instructions[name], ways) for name, ways in needs.items()}


def _count(value: Instruction, ways: Needs) -> int:
    whole = value.shape.element_count
    if value.shape.is_tuple:  # several results of one walk
        return whole if ways else 0
    return min(sum(map(prod, ways.values())), whole)


def _needs(module: Module, body: Computation, result: Needs | None, in_place: Collection[str]) -> dict[str, Needs]:
    """Needs of every instruction, given those of the root: all of it by default."""
    needs: dict[str, Needs] = {name: {} for name in body.instructions}
    root = body.root_instruction
    ends = root.operands if root.opcode == "tuple" else (root.name,)
    for name in ends:
        if name not in in_place:
            _add(needs[name], body.instructions[name], result or {(): body.instructions[name].shape.dimensions})
    for user in reversed(body.instructions.values()):
        if user is root and root.opcode == "tuple":
            continue
        if not needs[user.name] and user.name not in in_place:
            continue
        for name, handed in _handed(module, body, user, needs[user.name]):
            _add(needs[name], body.instructions[name], handed)
    return needs


def _add(known: Needs, value: Instruction, more: Mapping[Way, tuple[int, ...]]) -> None:
    """Puts needs together: what comes by one way is one need."""
    whole = value.shape.dimensions
    for way, counts in more.items():
        if len(counts) != len(whole):
            known[()] = whole
        else:
            known[way] = tuple(map(max, counts, known[way])) if way in known else counts
    if known.get(()) == whole or len(known) > _MOST_WAYS:
        known.clear()
        known[()] = whole


def _handed(
    module: Module, body: Computation, user: Instruction, needs: Needs
) -> Iterator[tuple[str, Mapping[Way, tuple[int, ...]]]]:
    """What an instruction of which `needs` are needed takes of its operands."""
    operands = [body.instructions[name] for name in user.operands]
    if user.opcode == "fusion":
        inner = module.computations[user.called[0]]
        chain = in_place_chain(inner) if user.is_root else ()
        found = _needs(module, inner, None if user.shape.is_tuple else needs, chain)
        for operand, parameter in zip(operands, inner.parameters, strict=True):
            yield operand.name, found[parameter.name]
        return
    for position, operand in enumerate(operands):
        sizes = operand.shape.dimensions
        whole: Needs = {(): sizes}
        if user.shape.is_tuple or operand.shape.is_tuple:
            yield operand.name, whole
        elif user.opcode in _ELSEWHERE:
            yield operand.name, _sliced(user, sizes, needs) if position == 0 else whole
        elif user.opcode in ("dynamic-update-slice", "scatter"):
            yield operand.name, _updated(user, operands, sizes, needs) if position == 0 else whole
        else:
            mapped = {way: _taken(user, position, sizes, counts) for way, counts in needs.items()}
            yield operand.name, mapped


def _sliced(user: Instruction, sizes: tuple[int, ...], needs: Needs) -> Needs:
    """A slice takes as much as is needed of it, by a way of its own."""
    if user.opcode == "gather":
        return {(user.name, *way): _spread(prod(counts), sizes) for way, counts in needs.items()}
    return {(user.name, *way): tuple(map(min, counts, sizes)) for way, counts in needs.items()}


def _updated(user: Instruction, operands: Sequence[Instruction], sizes: tuple[int, ...], needs: Needs) -> Needs:
    """What is not replaced is read by who reads on; a scatter that combines reads what it replaces."""
    if user.opcode == "dynamic-update-slice" or len(operands) != 3:
        return needs
    return {**needs, (user.name,): _spread(operands[2].shape.element_count, sizes)}


def _taken(user: Instruction, position: int, sizes: tuple[int, ...], counts: tuple[int, ...]) -> tuple[int, ...]:
    """Indices that `counts` of a result take of an operand, in each dimension."""
    results = user.shape.dimensions
    match user.opcode:
        case opcode if opcode in VIEWS:
            return _reshaped(counts, results, sizes)
        case "broadcast":
            return tuple(counts[number] for number in integers(user, "dimensions"))
        case "transpose":
            back = dict(zip(integers(user, "dimensions"), counts, strict=True))
            return tuple(back[number] for number in range(len(sizes)))
        case "reduce" if sizes:
            gone, kept = set(integers(user, "dimensions")), iter(counts)
            return tuple(size if number in gone else next(kept) for number, size in enumerate(sizes))
        case "concatenate" | "pad" if len(sizes) == len(counts):
            return tuple(map(min, counts, sizes))
        case opcode if sizes == results and opcode not in _NOT_POINTWISE:
            return counts
    return sizes


def _reshaped(counts: tuple[int, ...], results: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Counts of a result's dimensions as counts of the operand's, group by group of dimensions of equal product."""
    if counts == results or prod(results) != prod(sizes) or 0 in sizes:
        return sizes
    rest, left = list(zip(results, counts, strict=True)), list(sizes)
    found: list[int] = []
    while left:
        group = [left.pop(0)]
        product = count = 1
        while product != prod(group):
            if product < prod(group):
                size, taken = rest.pop(0)
                product, count = product * size, count * taken
            else:
                group.append(left.pop(0))
        found += _spread(count, group)
    return tuple(found)


def _spread(count: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """So many elements as counts of dimensions, the minor ones filled first; rounded up."""
    found: list[int] = []
    for size in reversed(sizes):
        taken = min(max(count, 1), size)
        found.append(taken)
        count = -(-count // max(taken, 1))
    return tuple(reversed(found))
