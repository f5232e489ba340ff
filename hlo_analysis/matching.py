"""Matches the launches of two analyses that do the same work.

The work of a launch is the set of JAX operations in its HLO, by op name and size. Kernels that hide their work, and
instructions that XLA inserted, are matched by the data that they read and write.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod

from hlo_analysis.records import OPAQUE_KINDS, Launch, LaunchKind

Pairs = set[tuple[int, int]]
"""Pairs of a launch before and a launch after that share work."""

_HIDDEN: tuple[LaunchKind, ...] = (*OPAQUE_KINDS, "cublas", "cublaslt", "cudnn")
"""Kernels that may do more work than their HLO shows."""


def matched(before: Sequence[Launch], after: Sequence[Launch]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the smallest groups of launches that do the same work, in program order.

    Each launch is in exactly one group. It is alone in it if the other side has none of its work.
    """
    old, new = _Side(before), _Side(after)
    pairs = _pairs_by_work(old, new)
    pairs |= _pairs_by_place(old, new, pairs)
    pairs |= _held_by_neighbours(old, new, pairs)
    pairs |= {(one, other) for other, one in _held_by_neighbours(new, old, _swapped(pairs))}
    return _groups(len(before), len(after), pairs)


class _Side:
    """The launches of one analysis, with their producers and consumers."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.launches = launches
        self.producers = [{*launch.producers} - {launch.index} for launch in launches]
        self.consumers: list[set[int]] = [set() for _ in launches]
        for index, producers in enumerate(self.producers):
            for producer in producers:
                self.consumers[producer].add(index)

    @cached_property
    def work(self) -> Mapping[Work, Counter[int]]:
        """Maps each operation to the launches that contain it, in program order, with counts."""
        places: dict[Work, Counter[int]] = defaultdict(Counter)
        for launch in self.launches:
            for work, count in _work(launch).items():
                places[work][launch.index] += count
        return places

    @cached_property
    def working(self) -> set[int]:
        """Returns the launches whose HLO shows operations of the program."""
        return {index for (_, size), places in self.work.items() if size for index in places}

    def around(self, index: int, stops: Iterable[int]) -> tuple[set[int], set[int]]:
        """Returns the nearest launches of `stops` that a launch gets data from, and those that get data from it."""
        return _nearest(index, self.producers, set(stops)), _nearest(index, self.consumers, set(stops))


def _nearest(start: int, edges: Sequence[set[int]], stops: set[int]) -> set[int]:
    found: set[int] = set()
    seen, waiting = {start}, list(edges[start])
    while waiting:
        index = waiting.pop()
        if index in stops:
            found.add(index)
        elif index not in seen:
            seen.add(index)
            waiting += edges[index]
    return found


Work = tuple[str, int]
"""An op name without its functions, and the element count of its result; 0 if the HLO shows no operation."""

_INSTRUCTION = re.compile(r" *(?:ROOT )?%\S+ = (\S.*?) ([a-z][a-z0-9-]*)\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SIZES = re.compile(r"\[([0-9,]*)\]")
_FUNCTION = re.compile(r"\bp?jit\([^()]*\)/?")
_NO_WORK = frozenset(
    (
        *("parameter", "constant", "broadcast", "iota", "bitcast", "reshape"),
        *("tuple", "get-tuple-element", "fusion", "call"),
    )
)
"""Opcodes that XLA adds, drops and duplicates freely, and those that only contain other instructions."""


def _work(launch: Launch) -> Counter[Work]:
    found: Counter[Work] = Counter()
    for line in launch.hlo.splitlines():
        instruction, name = _INSTRUCTION.match(line), _OP_NAME.search(line)
        if instruction and name and instruction[2] not in _NO_WORK:
            sizes = _SIZES.search(instruction[1])
            elements = prod(int(size) for size in sizes[1].split(",") if size) if sizes else 1
            found[_plain(name[1]), elements] += 1
    if not found and launch.op_name:
        found[_plain(launch.op_name), 0] += 1
    return found


def _plain(op_name: str) -> str:
    return _FUNCTION.sub("", op_name.partition(";")[0])


def _pairs_by_work(old: _Side, new: _Side) -> Pairs:
    """Pairs launches that contain the same operation.

    An operation in several launches counts only if it can be told apart: by the order of the launches if both sides
    have equally many, else by the order of the operations.
    """
    pairs: Pairs = set()
    for work in old.work.keys() & new.work.keys():
        ones, others = old.work[work], new.work[work]
        if len(ones) == 1 or len(others) == 1:
            pairs |= {(one, other) for one in ones for other in others}
        elif len(ones) == len(others):
            pairs |= set(zip(ones, others, strict=True))
        elif ones.total() == others.total():
            pairs |= set(zip(ones.elements(), others.elements(), strict=True))
    return pairs


def _pairs_by_place(old: _Side, new: _Side, pairs: Pairs) -> Pairs:
    """Pairs launches without a partner that stand between the same others, if one of them hides its work."""
    partners = _partners(_swapped(pairs))
    ones = _left(old, pairs)
    others = _left(new, _swapped(pairs))
    places = {other: new.around(other, partners) for other in others}
    known = [one for one, _ in pairs]
    found: Pairs = set()
    for one in ones:
        above, below = old.around(one, known)
        for other, (sources, users) in places.items():
            is_hidden = old.launches[one].kind in _HIDDEN or new.launches[other].kind in _HIDDEN
            if is_hidden and _agree(above, _all(partners, sources)) and _agree(below, _all(partners, users)):
                found.add((one, other))
    return found


def _held_by_neighbours(old: _Side, new: _Side, pairs: Pairs) -> Pairs:
    """Pairs launches of `old` without a partner with the launch that contains their neighbours' work."""
    partners = _partners(pairs)
    found: Pairs = set()
    for one in _left(old, pairs):
        above, below = (_all(partners, around) for around in old.around(one, partners))
        holders = above & below
        if not holders and not (above and below) and len(above | below) == 1 and one not in old.working:
            holders = above | below
        if not holders:  # the epilogue of a library's product, or work on its operand
            near = {(source, user) for source in above for user in below if user in new.consumers[source]}
            hiding = [each for pair in sorted(near) for each in pair if new.launches[each].kind in _HIDDEN]
            holders = set(hiding[:1])
        found |= {(one, holder) for holder in holders}
    return found


def _left(side: _Side, pairs: Pairs) -> list[int]:
    done = {one for one, _ in pairs}
    return [launch.index for launch in side.launches if launch.index not in done]


def _swapped(pairs: Pairs) -> Pairs:
    return {(other, one) for one, other in pairs}


def _partners(pairs: Pairs) -> dict[int, set[int]]:
    partners: dict[int, set[int]] = defaultdict(set)
    for one, other in pairs:
        partners[one].add(other)
    return dict(partners)


def _all(partners: Mapping[int, set[int]], indices: Iterable[int]) -> set[int]:
    return {other for index in indices for other in partners[index]}


def _agree(ones: set[int], others: set[int]) -> bool:
    return bool(ones & others) or not (ones or others)


def _groups(before: int, after: int, pairs: Pairs) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the connected components of the graph of pairs."""
    groups: dict[int, set[int]] = {index: {index} for index in (*range(before), *range(-after, 0))}
    for one, other in pairs:  # launches of the second analysis have numbers from -1 down
        small, large = sorted((groups[one], groups[-1 - other]), key=len)
        if small is not large:
            large |= small
            groups |= dict.fromkeys(small, large)
    distinct = {id(group): group for group in groups.values()}.values()
    found = [
        (tuple(sorted(i for i in group if i >= 0)), tuple(sorted(-1 - i for i in group if i < 0))) for group in distinct
    ]
    return sorted(found, key=lambda group: (min(group[1] or group[0]), bool(group[1])))
