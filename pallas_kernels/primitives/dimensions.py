"""Names of the dimensions of an operation's arrays, from which follows how devices share its work.

A name stands for the same dimension wherever it occurs. Devices may each have a part of it in all arrays that have it;
an array that lacks it is whole on each of them, and its gradient is a sum over them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.sharding import PartitionSpec

Dimension = tuple[str, ...]
"""The names of a dimension, the major one first; () for one of size 1, or one that all devices need whole."""
Axes = tuple[str, ...]
"""Names of mesh axes."""
ROWS = "..."
"""The leading dimensions, whose names begin so."""


Parts = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
"""Computes results from parts of arrays: a function of the arguments and of a `Sums` for each name that is cut."""


BlockInPlace = Callable[[Mapping[str, Any], Any], Any]
"""Computes results for one block of rows: a function of the arguments and of the `RowBlock` that is written."""


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """How devices may share an operation's work; the arguments of `operation`."""

    text: str | Callable[[Mapping[str, Any]], str]
    parts: Parts | None = None
    scatters: bool = False
    in_place: BlockInPlace | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """The dimensions of one call's arrays.

    sizes: of each name. whole: names that each device needs whole. summed: names over which the results have sums.
    scatters: as in `operation`. labels: of the first operands, the arguments. wholes: of arguments that tell of a whole
    array, by their places, "key" or "sizes" and the array's dimensions. primal: for gradients, how many operands are
    not cotangents; None for a forward pass. overlaps: whether the call was traced under `overlapped_collectives`.
    """

    operands: tuple[tuple[Dimension, ...], ...]
    results: tuple[tuple[Dimension, ...], ...]
    sizes: Mapping[str, int]
    whole: frozenset[str]
    summed: frozenset[str]
    scatters: bool = False
    labels: tuple[str, ...] = ()
    wholes: Mapping[int, tuple[str, tuple[Dimension, ...]]] = field(default_factory=dict)
    primal: int | None = None
    overlaps: bool = False

    @property
    def arrays(self) -> tuple[tuple[Dimension, ...], ...]:
        """The dimensions of operands and results."""
        return (*self.operands, *self.results)

    def mapped(self, is_mapped: Sequence[bool], size: int) -> Rule:
        """Returns the rule with a leading dimension for `jax.vmap`; all results have it."""
        name = f"vmap{sum(name.startswith('vmap') for name in self.sizes)}"
        operands = tuple(((name,), *own) if each else own for own, each in zip(self.operands, is_mapped, strict=True))
        results = tuple(((name,), *own) for own in self.results)
        return replace(self, operands=operands, results=results, sizes={**self.sizes, name: size})

    def named(self, shape: Sequence[int]) -> tuple[Dimension, ...]:
        """Returns the names of an array that the operation keeps for its gradient, () for a dimension of no known name.

        Where sizes are equal by chance, a name may be wrong: then parts of the array do not have the expected shape.
        """
        found: list[Dimension] = []
        for size in shape:
            used = {name for own in found for name in own}
            found.append(next((run for run in self._runs(size) if not used & set(run)), ()))
        return tuple(found)

    def _runs(self, size: int) -> Iterator[Dimension]:
        for own in (*self.results, *self.operands):
            names = [name for dimension in own for name in dimension]
            for i in range(len(names)):
                for j in range(i + 1, len(names) + 1):
                    if prod(self.sizes[name] for name in names[i:j]) == size:
                        yield tuple(names[i:j])

    def with_kept(self, kept: Sequence[Sequence[Dimension]]) -> Rule:
        """Returns the rule from the operands to the results and to arrays that are kept for the gradient."""
        return replace(self, results=(*self.results, *map(apart, kept)))

    def for_gradients(self, wanted: Sequence[bool], kept: Sequence[Sequence[Dimension]], given: Sequence[bool]) -> Rule:
        """Returns the rule from operands, kept arrays and given cotangents of results to gradients of operands."""
        cotangents = tuple(own for own, each in zip(self.results, given, strict=True) if each)
        gradients = tuple(own for own, each in zip(self.operands, wanted, strict=True) if each)
        primal = (*self.operands, *map(apart, kept))
        return replace(self, operands=(*primal, *cotangents), results=gradients, primal=len(primal))

    def shardy(self) -> SdyShardingRule:
        """Returns the rule by which Shardy propagates shardings."""
        single, order = set[str](), dict[str, None]()
        mappings = []
        for dimensions in self.arrays:
            mapping = []
            for own in dimensions:
                names = tuple(name.replace(ROWS, "rows") for name in own) or (f"one{len(order)}",)
                order |= dict.fromkeys(names)
                single |= set(names) if len(names) == 1 else set()
                mapping.append(names[0] if len(names) == 1 else CompoundFactor(*names))
            mappings.append(ArrayMapping(*mapping))
        return SdyShardingRule(
            tuple(mappings[: len(self.operands)]),
            tuple(mappings[len(self.operands) :]),
            need_replication_factors=tuple(name for name in order if name in self.whole),
            **{name: self.sizes[name.replace("rows", ROWS)] for name in order if name not in single},  # pyright: ignore
        )

    def assigned(self, sizes: Mapping[str, int], asked: Sequence[Any]) -> dict[str, Axes]:
        """Returns the mesh axes of each name.

        Names of `summed` come first where all operands that have one agree, then those of results or their cotangents,
        then those of the largest arrays; of the arguments in order, where nothing is asked of results. An axis is used
        once, where it divides the dimension.

        sizes: of the mesh axes. asked: the partition spec of each array, operands before results.
        """
        axes_of: dict[str, Axes] = {}
        first = range(len(self.operands), len(asked)) if self.primal is None else range(self.primal, len(self.operands))
        others: Sequence[int] = sorted(set(range(len(asked))) - set(first), key=self._size, reverse=True)
        if self.primal is None and not any(axes_at(asked[i], k) for i in first for k in range(len(self.arrays[i]))):
            others = range(len(self.operands))
        for name in sorted(self.summed):
            places = [(i, own.index((name,))) for i, own in enumerate(self.operands) if (name,) in own]
            found = {axes_at(asked[i], place) for i, place in places}
            if len(found) == 1 and len(places) > 1:
                self._take(name, found.pop(), sizes, axes_of)
        for i in (*first, *others):
            for place, own in enumerate(self.arrays[i]):
                left = axes_at(asked[i], place)
                for name in own:
                    if name not in axes_of:
                        self._take(name, left, sizes, axes_of)
                    taken = axes_of.get(name, ())
                    left = left[len(taken) :] if left[: len(taken)] == taken else ()
                    if prod(sizes[axis] for axis in taken) < self.sizes[name]:
                        break  # parts of a minor name are in one piece only where the major one is cut to single ones
        return {name: axes for name, axes in axes_of.items() if axes}

    def gathered(self, asked: Sequence[Any], axes_of: Mapping[str, Axes]) -> dict[str, list[str]]:
        """Returns the mesh axes that cut nothing, with the matrices and larger arguments that are gathered over each.

        Along such an axis devices repeat the work. asked: the partition spec of each array.
        """
        used = {axis for axes in axes_of.values() for axis in axes}
        found: dict[str, list[str]] = {}
        for label, own, spec in zip(self.labels, self.operands, asked, strict=False):
            for axis in (axis for place in range(len(own)) for axis in axes_at(spec, place)):
                if len(own) > 1 and axis not in used:
                    found.setdefault(axis.partition(".")[0], []).append(label)
        return found

    def _size(self, i: int) -> int:
        return prod(self.sizes[name] for own in self.arrays[i] for name in own)

    def _take(self, name: str, axes: Axes, sizes: Mapping[str, int], axes_of: dict[str, Axes]) -> None:
        used = {axis for other in axes_of.values() for axis in other}
        taken: list[str] = []
        for axis in axes:
            if axis in used or name in self.whole or self.sizes[name] % prod(sizes[a] for a in (*taken, axis)):
                break
            taken.append(axis)
        if taken:
            axes_of[name] = tuple(taken)


def apart(dimensions: Sequence[Dimension]) -> tuple[Dimension, ...]:
    """Returns the dimensions with one for each name."""
    return tuple((name,) if name else () for own in dimensions for name in own or ("",))


def sizes_apart(dimensions: Sequence[Dimension], shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of an array that has one dimension for each name."""
    return tuple(
        sizes[name] if name else size for own, size in zip(dimensions, shape, strict=True) for name in own or ("",)
    )


def axes_at(spec: Sequence[Any], place: int) -> Axes:
    """Returns the mesh axes that a partition spec has for a dimension."""
    entry = spec[place] if place < len(spec) else None
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def spec_of(dimensions: Sequence[Dimension], axes_of: Mapping[str, Axes]) -> PartitionSpec:
    """Returns the partition spec of an array."""
    entries = [sum((axes_of.get(name, ()) for name in own), ()) for own in dimensions]
    return PartitionSpec(*(axes or None for axes in entries))


def names_in(dimensions: Sequence[Dimension]) -> frozenset[str]:
    """Returns the names of an array's dimensions."""
    return frozenset(name for own in dimensions for name in own)


def rule_of(
    dimensions: Dimensions,
    arguments: Mapping[str, Any],
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    results: Sequence[tuple[int, ...]],
) -> Rule | str:
    """Returns the rule of one call, or why devices cannot share its work.

    arguments: all of them, by name. shapes: name and shape of each array. results: the shapes of the results.
    """
    text = dimensions.text(arguments) if callable(dimensions.text) else dimensions.text
    marks = {mark: set(re.findall(rf"\{mark}(\w+|\.\.\.)", text)) for mark in "!+"}
    left, _, right = re.sub("[!+]", "", text).partition("->")
    patterns = {name.strip(): pattern for name, _, pattern in (each.partition(":") for each in left.split(","))}
    if unknown := [name for name, _ in shapes if name not in patterns]:
        return f"{unknown[0]} belongs to the whole of the arrays"
    told_of = {i: patterns[name].split(" of ") for i, (name, _) in enumerate(shapes) if " of " in patterns[name]}
    arrays = [(patterns[name], shape) for name, shape in shapes]
    arrays += zip(right.split(","), results, strict=False)
    expanded = [
        ([()] * len(shape) if i in told_of else _names(pattern, len(shape)), shape)
        for i, (pattern, shape) in enumerate(arrays)
    ]
    sizes: dict[str, int] = {}
    for own, shape in expanded:
        for names, size in zip(own, shape, strict=True):
            if len(names) == 1:
                sizes[names[0]] = max(size, sizes.get(names[0], 1))
    for own, shape in expanded:
        for names, size in zip(own, shape, strict=True):
            missing = [name for name in names if name not in sizes]
            if len(missing) == 1 and size > 1:
                sizes[missing[0]] = size // prod(sizes[name] for name in names if name in sizes)
    named = tuple(
        tuple(_present(names, size, sizes) for names, size in zip(own, shape, strict=True)) for own, shape in expanded
    )
    count = len(shapes)
    wholes = {i: (kind.strip(), _of_rank(pattern, sizes)) for i, (kind, pattern) in told_of.items()}
    names, in_results = names_in(sum(named, ())), names_in(sum(named[count:], ()))
    summed = {name for name in names if (ROWS if name.startswith(ROWS) else name) in marks["+"]}
    return Rule(
        operands=named[:count],
        results=named[count:],
        sizes={name: size for name, size in sizes.items() if name in names},
        whole=frozenset(marks["!"] | (names - in_results - summed)),
        summed=frozenset(summed),
        scatters=dimensions.scatters,
        labels=tuple(name for name, _ in shapes),
        wholes=wholes,
    )


def _of_rank(pattern: str, sizes: Mapping[str, int]) -> tuple[Dimension, ...]:
    """Returns the names of the dimensions of an array that has all leading ones."""
    words = [() if word == ("_",) else word for word in _words(pattern)]
    leading = [(name,) for name in sorted((name for name in sizes if name.startswith(ROWS)), reverse=True)]
    own = [each for word in words for each in (leading if word == (ROWS,) else [word])]
    return tuple(tuple(name for name in each if sizes.get(name, 1) > 1) for each in own)


def _names(pattern: str, rank: int) -> list[Dimension]:
    """Returns the names of an array's dimensions: those of the first alternative that has the rank."""
    for alternative in pattern.split("|"):
        own = _words(alternative)
        if own and own[0] == (ROWS,):
            leading = rank - len(own) + 1
            own = [*((f"{ROWS}{leading - 1 - i}",) for i in range(leading)), *own[1:]]
        if len(own) == rank:
            return own
    return _words(pattern.split("|")[0])[-rank or None :] if rank else []


def _words(pattern: str) -> list[Dimension]:
    return [tuple(word.strip("()").split()) for word in re.findall(r"\([^)]*\)|\S+", pattern)]


def _present(names: Dimension, size: int, sizes: Mapping[str, int]) -> Dimension:
    """Returns the names of a dimension that are larger than 1; none of one that is broadcast."""
    if size != prod(sizes.get(name, 0) for name in names):
        return ()
    return tuple(name for name in names if sizes[name] > 1)
