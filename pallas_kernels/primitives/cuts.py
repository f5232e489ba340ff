"""How one call's arrays are cut over devices, and sums over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels.primitives.dimensions import (
    ROWS,
    Axes,
    Rule,
    axes_at,
    names_in,
    spec_of,
)
from pallas_kernels.primitives.random import part_words

part: ContextVar[tuple[str, str] | None] = ContextVar("part", default=None)
"""One device's parts of a call in words, and the call's place in the program, while what it computes is traced."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Collective sums over the mesh axes that cut a name, for `Dimensions.parts`.

    axes: over which the name is cut. scattered: the dimension of the results along which each device keeps its part of
    the sum alone, or None where it keeps the sum. overlaps: as in `Rule`, for the forward pass.
    """

    axes: Axes
    scattered: int | None = None
    overlaps: bool = False

    def total(self, part: jax.Array) -> jax.Array:
        """Returns the sum of all devices' arrays, or this device's part of it."""
        if self.scattered is None:
            return lax.psum(part, self.axes)
        return lax.psum_scatter(part, self.axes, scatter_dimension=self.scattered, tiled=True)

    def mean(self, part: jax.Array) -> jax.Array:
        """Returns the mean over the last dimension, which is cut, and which the result has with size 1."""
        return lax.pmean(jnp.mean(part, axis=-1, keepdims=True), self.axes)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one call's arrays are cut.

    axes_of: the mesh axes of each name that is cut. sizes: of each name's part. sums: for `Dimensions.parts`.
    along: the names along which these scatter, and over how many devices. scattered: for results that are sums over
    devices, the dimensions that are scattered and the axes.
    """

    axes_of: Mapping[str, Axes]
    sizes: Mapping[str, int]
    along: Mapping[str, int]
    sums: Mapping[str, Sums]
    scattered: tuple[Mapping[int, Axes], ...]

    @property
    def shared(self) -> Axes:
        """The axes over which the work is cut, without sums for it."""
        summed = {axis for each in self.sums.values() for axis in each.axes}
        return tuple(axis for axes in self.axes_of.values() for axis in axes if axis not in summed)

    def sizes_of(self, summed: frozenset[str]) -> Mapping[str, int]:
        """The sizes of parts of an array that has these names of sums: they are not scattered."""
        if summed:
            return self.sizes
        return {name: size // self.along.get(name, 1) for name, size in self.sizes.items()}

    def own(self, dimensions: Sequence[tuple[str, ...]]) -> Axes:
        """The axes over which an array is cut."""
        names = names_in(dimensions)
        return tuple(axis for name, axes in self.axes_of.items() if name in names for axis in axes)

    def lacked(self, dimensions: Sequence[tuple[str, ...]]) -> Axes:
        """The axes over which the work is cut, but not this array."""
        own = self.own(dimensions)
        return tuple(axis for axis in self.shared if axis not in own)


def cut_of(rule: Rule, sizes: Mapping[str, int], asked: Sequence[Any]) -> tuple[Cut, list[PartitionSpec]]:
    """Returns how a call's arrays are cut, and their partition specs.

    sizes: of the mesh axes. asked: the partition spec that XLA has for each array, operands before results.
    """
    axes_of = rule.assigned(sizes, asked)
    count = len(rule.operands)
    results = list(zip(rule.results, asked[count:], strict=True))
    sums: dict[str, Sums] = {}
    along: dict[str, Axes] = {}
    for name in sorted(rule.summed & axes_of.keys()):
        axes, place = axes_of[name], None
        if rule.primal is None and rule.scatters:
            sums_of = [
                (own, spec) for own, spec in results if name not in names_in(own)
            ]  # not what gradients keep of x
            found = [_scattered(rule, own, spec, axes, axes_of, sizes) for own, spec in sums_of]
            if len(found[0]) == 1 and all(each == found[0] for each in found) and set(*found[0].values()) == set(axes):
                (place,) = found[0]
                along[sums_of[0][0][place][0]] = axes
        key = ROWS if name.startswith(ROWS) else name
        others = sums[key].axes if key in sums else ()
        sums[key] = Sums(axes=(*others, *axes), scattered=place, overlaps=rule.overlaps and rule.primal is None)
    parts = {name: size // prod(sizes[axis] for axis in axes_of.get(name, ())) for name, size in rule.sizes.items()}
    counts = {name: prod(sizes[axis] for axis in axes) for name, axes in along.items()}
    cut = Cut(axes_of=axes_of, sizes=parts, along=counts, sums=sums, scattered=())
    with_scattered = {**axes_of, **along}
    specs = [spec_of(own, axes_of if names_in(own) & rule.summed else with_scattered) for own in rule.arrays]
    if rule.primal is None:
        return replace(cut, scattered=({},) * len(results)), specs
    scattered = [_scattered(rule, own, spec, cut.lacked(own), axes_of, sizes) for own, spec in results]
    for i, each in enumerate(scattered):
        entries = list(specs[count + i])
        for place, axes in each.items():
            entries[place] = axes
        specs[count + i] = PartitionSpec(*entries)
    return replace(cut, scattered=tuple(scattered)), specs


def _scattered(
    rule: Rule,
    dimensions: Sequence[tuple[str, ...]],
    asked: Any,
    summed: Axes,
    axes_of: Mapping[str, Axes],
    sizes: Mapping[str, int],
) -> dict[int, Axes]:
    """Returns the dimensions of a result along which a sum over devices is to be cut over them, with the axes."""
    found = {}
    for place, own in enumerate(dimensions):
        axes = axes_at(asked, place)
        is_free = len(own) == 1 and own[0] not in axes_of and own[0] not in rule.whole
        if axes and set(axes) <= set(summed) and is_free and rule.sizes[own[0]] % prod(sizes[a] for a in axes) == 0:
            found[place] = axes
    return found


def text_of_parts(rule: Rule, cut: Cut, asked: Sequence[Any]) -> str:
    """Describes the shards of the arguments on one device: 'x (2, 512) by d, w (512, 1024) whole'."""
    words = []
    for name, own in zip(rule.labels, rule.operands, strict=False):
        shape = tuple(prod(cut.sizes[each] for each in names) for names in own)
        axes = dict.fromkeys(axis.partition(".")[0] for axis in cut.own(own))
        words.append(f"{name} {shape} {'by ' + ', '.join(axes) if axes else 'whole'}")
    gathered = rule.gathered(asked, cut.axes_of).items()
    return "; ".join([", ".join(words), *(f"{', '.join(names)} gathered over {axis}" for axis, names in gathered)])


def told_of_parts(rule: Rule, cut: Cut | None, arrays: Sequence[Any]) -> Sequence[Any]:
    """Returns the arguments, those that tell of a whole array (`Rule.wholes`) replaced by what is so of a part."""
    if cut is None or not rule.wholes:
        return arrays
    told = list(arrays)
    for i, (kind, dimensions) in rule.wholes.items():
        whole, part, start = _part_of(rule, cut, dimensions)
        if whole == part:
            continue
        if kind == "key":
            told[i] = part_words(arrays[i], whole=whole, part=part, start=start)
        else:
            ends = jnp.cumsum(jnp.clip(arrays[i].astype(jnp.int32), 0, whole[0]))
            ends = jnp.clip(ends - start[0], 0, part[0])
            told[i] = jnp.diff(ends, prepend=0).astype(arrays[i].dtype)
    return told


def _part_of(
    rule: Rule, cut: Cut, dimensions: Sequence[tuple[str, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    """Returns the shapes of an array and of this device's part of it, and where the part starts."""
    whole, part, start = [], [], []
    for own in dimensions:
        whole.append(prod(rule.sizes[name] for name in own))
        part.append(prod(cut.sizes[name] for name in own))
        first = 0
        for name in own:
            index = lax.axis_index(cut.axes_of[name]) if name in cut.axes_of else 0
            first = first * rule.sizes[name] + index * cut.sizes[name]
        start.append(first)
    return tuple(whole), tuple(part), start


def summed(part: jax.Array, axes: Axes, scattered: Mapping[int, Axes]) -> jax.Array:
    """Returns the sum of all devices' parts over mesh axes, of which each device keeps its part where it is asked."""
    if not axes:
        return part
    # In float32 what has few bytes, such as a scale's gradient; XLA adds up others in their own dtype.
    total = part.astype(jnp.float32) if part.ndim == 1 and part.dtype.itemsize < 4 else part
    for place, over in scattered.items():
        total = lax.psum_scatter(total, over, scatter_dimension=place, tiled=True)
    if rest := tuple(axis for axis in axes if axis not in sum(scattered.values(), ())):
        total = lax.psum(total, rest)
    return total.astype(part.dtype)


def varying(array: jax.Array, axes: Axes) -> jax.Array:
    """Marks an array as varying over mesh axes."""
    missing = tuple(axis for axis in axes if axis not in jax.typeof(array).manual_axis_type.varying)
    return lax.pcast(array, missing, to="varying") if missing else array
