"""Counts the elements of each instruction that a fusion computes, propagated from its results to its parameters.

XLA's emitters compute a fusion from its results backwards. Instructions before a slice are computed only for the slice:
`norm(x)[:, -1]` reads one row per batch. The demand on a value is a number of indices in each dimension, not which
ones. Demands through different slices are kept apart and added up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from hlo_analysis.hlo import Computation, Instruction, Module
from hlo_analysis.hlo.attributes import integers
from hlo_analysis.program.dataflow import VIEWS
from hlo_analysis.program.inplace_updates import in_place_chain

Way = tuple[str, ...]
"""The slices between a value and the results, the slice nearest to the value first."""

Needs = dict[Way, tuple[int, ...]]
"""For each way to the results, the number of indices needed in each dimension."""

_INDEXING = frozenset({"slice", "dynamic-slice", "gather", "reverse"})
"""Opcodes whose elements come from other positions of their operand."""

_NOT_POINTWISE = frozenset(
    {
        *("dot", "scaled-dot", "convolution", "custom-call", "sort", "fft", "cholesky", "triangular-solve"),
        *("reduce-window", "select-and-scatter", "rng-bit-generator", "batch-norm-training", "batch-norm-grad"),
    }
)
"""Opcodes whose operand may have the shape of the result, but whose elements each need several operand elements."""

# Beyond this many ways, demands are merged into one (a scan of log2(n) steps has two slices a step).
_MOST_WAYS = 16


def needed_elements(module: Module, body: Computation) -> dict[str, int]:
    """Counts the elements that a fused computation makes of each instruction, or reads of each parameter.

    Instructions on a chain of in-place updates that ends in a result count 0: elements that the chain does not replace
    stay where they are.
    """
    needs = _needs(module, body, None, in_place_chain(body))
    return {name: _count(body.instructions[name], ways) for name, ways in needs.items()}


def _count(value: Instruction, ways: Needs) -> int:
    whole = value.shape.element_count
    if value.shape.is_tuple:  # a tuple result, which one pass computes as a whole
        return whole if ways else 0
    return min(sum(map(prod, ways.values())), whole)


def _needs(module: Module, body: Computation, result: Needs | None, in_place: Collection[str]) -> dict[str, Needs]:
    """Returns the demand on every instruction, given the demand on the root (by default all of it)."""
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
        for name, operand_needs in _operand_needs(module, body, user, needs[user.name]):
            _add(needs[name], body.instructions[name], operand_needs)
    return needs


def _add(known: Needs, value: Instruction, more: Mapping[Way, tuple[int, ...]]) -> None:
    """Merges demands: those that come by one way become one, the larger in each dimension."""
    whole = value.shape.dimensions
    for way, counts in more.items():
        if len(counts) != len(whole):
            known[()] = whole
        else:
            known[way] = tuple(map(max, counts, known[way])) if way in known else counts
    if known.get(()) == whole or len(known) > _MOST_WAYS:
        known.clear()
        known[()] = whole


def _operand_needs(
    module: Module, body: Computation, user: Instruction, needs: Needs
) -> Iterator[tuple[str, Mapping[Way, tuple[int, ...]]]]:
    """Yields each operand of `user` with the demand on it, given the demand `needs` on `user`."""
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
        elif user.opcode in _INDEXING:
            yield operand.name, _needs_of_slice(user, sizes, needs) if position == 0 else whole
        elif user.opcode in ("dynamic-update-slice", "scatter"):
            yield operand.name, _needs_of_update(user, operands, sizes, needs) if position == 0 else whole
        else:
            mapped = {way: _counts_of_operand(user, sizes, counts) for way, counts in needs.items()}
            yield operand.name, mapped


def _needs_of_slice(user: Instruction, sizes: tuple[int, ...], needs: Needs) -> Needs:
    """Returns the demand of a slice on its operand: as many elements as the slice needs, by a way of its own."""
    if user.opcode == "gather":
        return {(user.name, *way): _spread(prod(counts), sizes) for way, counts in needs.items()}
    return {(user.name, *way): tuple(map(min, counts, sizes)) for way, counts in needs.items()}


def _needs_of_update(user: Instruction, operands: Sequence[Instruction], sizes: tuple[int, ...], needs: Needs) -> Needs:
    """Returns the demand of an in-place update on its operand.

    Elements that are not replaced are needed if the result needs them. A scatter that combines also reads the elements
    it replaces.
    """
    if user.opcode == "dynamic-update-slice" or len(operands) != 3:
        return needs
    return {**needs, (user.name,): _spread(operands[2].shape.element_count, sizes)}


def _counts_of_operand(user: Instruction, sizes: tuple[int, ...], counts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns how many indices of an operand, in each dimension, `counts` indices of the result need."""
    results = user.shape.dimensions
    match user.opcode:
        case opcode if opcode in VIEWS:
            return _counts_before_reshape(counts, results, sizes)
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


def _counts_before_reshape(
    counts: tuple[int, ...], results: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Converts counts of the result's dimensions to the operand's, by groups of dimensions with equal product."""
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
    """Distributes a number of elements over dimensions, filling the minor ones first and rounding up."""
    found: list[int] = []
    for size in reversed(sizes):
        taken = min(max(count, 1), size)
        found.append(taken)
        count = -(-count // max(taken, 1))
    return tuple(reversed(found))
