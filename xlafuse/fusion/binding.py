"""Binds arguments of operations to a program's values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.fusion.graph import Equation, Value
from xlafuse.fusion.indices import ZERO, Index, merged
from xlafuse.fusion.layouts import Ref


@dataclass(frozen=True)
class Binding:
    """An argument as a value of the program in another layout.

    places: for each axis of the value, the range (start, step, size) that the argument has; size 0 for one position.
    parts: the shape that these ranges are split to. order: how the parts are transposed. shape: the argument's.
    missing: axes of the argument along which the value does not change.
    """

    value: Value
    places: tuple[tuple[int, int, int], ...]
    parts: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    missing: tuple[int, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Binding) and self.value is other.value and self.layout == other.layout

    def __hash__(self) -> int:
        return hash((id(self.value), self.layout))

    @property
    def layout(self) -> tuple[Any, ...]:
        """Returns all but the value."""
        return self.places, self.parts, self.order, self.shape, self.missing


def whole(value: Value) -> Binding:
    """Returns a value as an argument of its shape."""
    places = tuple((0, 1, size) for size in value.shape)
    return Binding(value, places, value.shape, tuple(range(len(value.shape))), value.shape)


def is_permuted(order: tuple[int, ...]) -> bool:
    """Returns whether an order moves axes."""
    return order != tuple(range(len(order)))


def has_all(binding: Binding) -> bool:
    """Returns whether a binding has all elements of its value."""
    return all(
        (start, step, size or 1) == (0, 1, length)
        for (start, step, size), length in zip(binding.places, binding.value.shape, strict=True)
    )


def is_whole(binding: Binding) -> bool:
    """Returns whether a binding has all elements of its value, in row-major order."""
    return has_all(binding) and not is_permuted(binding.order) and not binding.missing


def is_cut(binding: Binding) -> bool:
    """Returns whether a binding has a part of an axis of its value, other than whole columns of several heads."""
    parts = list(binding.parts)
    for (_, _, size), length in zip(binding.places, binding.value.shape, strict=True):
        own = [parts.pop(0)] if size and parts else []
        while own and math.prod(own) < size:
            own.append(parts.pop(0))
        if size not in (0, length) and len(own) == 1:
            return True
    return False


def order_of(binding: Binding) -> tuple[int, ...]:
    """Returns how a value's axes are transposed, where the argument is the whole value; () for anything else."""
    is_value = has_all(binding) and binding.parts == binding.value.shape and not binding.missing
    return binding.order if is_value else ()


def transposed(binding: Binding, order: Sequence[int]) -> Binding:
    """Returns the binding to its value transposed to this order of axes; the caller sets `value` and `places`."""
    parts, groups = list(enumerate(binding.parts)), []
    for length in binding.value.shape:  # the parts that each axis is split to
        group: list[int] = []
        while parts and length % parts[0][1] == 0 and length > 1:
            at, size = parts.pop(0)
            group.append(at)
            length //= size
        groups.append(group)
    moved = [at for axis in order for at in groups[axis]]
    return replace(
        binding,
        parts=tuple(binding.parts[at] for at in moved),
        order=tuple(moved.index(at) for at in binding.order),
    )


def laid_out(binding: Binding, array: Any, *, keeps_missing: bool) -> jax.Array:
    """Makes an argument from the array that it is bound to."""
    array = jnp.asarray(array)
    for axis, (start, step, size) in enumerate(binding.places):
        length = size or 1
        if (start, step, length) != (0, 1, array.shape[axis]):
            array = jax.lax.slice_in_dim(array, start, start + step * (length - 1) + 1, step, axis)
    array = array.reshape(binding.parts).transpose(binding.order)
    shape = tuple(1 if axis in binding.missing else size for axis, size in enumerate(binding.shape))
    array = array.reshape(shape)
    return array if keeps_missing or not binding.missing else jnp.broadcast_to(array, binding.shape)


def equations_between(value: Value, arguments: Any) -> set[Equation]:
    """Returns the equations from the arguments to a value."""
    ends = {binding.value for binding in arguments}
    found: set[Equation] = set()
    pending = [value]
    while pending:
        each = pending.pop()
        if each in ends or each.equation is None or each.equation in found:
            continue
        found.add(each.equation)
        pending += each.equation.inputs
    return found


def bind(wanted: Ref, found: Ref, names: Mapping[int, int]) -> Binding | None:
    """Binds an argument, of which `wanted` is an element, to the value of which `found` is the same element.

    names: the program's variables, by the pattern's. Returns None where the argument is no layout of the value.
    """
    shape = wanted.value.shape
    asked = {}
    for axis, index in enumerate(wanted.indices):
        own = index.renamed(names)
        if own is None:
            return None
        if shape[axis] != 1:
            asked[axis] = own
    places, parts, labels, left = [], [], [], dict(asked)
    rest = list(enumerate(zip(found.indices, found.value.shape, strict=True)))
    while rest:
        place, (index, size) = rest.pop(0)
        if size > 1 and shape == found.value.shape and left.get(place) == index:  # the same place, maybe one position
            places.append((0, 1, size))
            parts.append(size)
            labels.append((place, 0))
            del left[place]
            continue
        if not index.digits:
            places.append((index.start, 1, 0))
            continue
        axes = _axes_of(index, size, left, shape)
        if axes is not None:
            places.append((0, 1, size))
            parts += [shape[axis] for axis in axes]
            labels += [(axis, 0) for axis in axes]
            for axis in axes:
                del left[axis]
            continue
        if (sliced := _sliced(index, size, left, shape)) is not None:
            axis, start, step = sliced
            places.append((start, step, shape[axis]))
            parts.append(shape[axis])
            labels.append((axis, 0))
            del left[axis]
            continue
        whole = _split_axis(place, found, left, shape)
        if whole is None:
            return None
        axis, members = whole
        if members[0] != place:  # in another order: the rest of it comes later
            return None
        for number, member in enumerate(members):
            places.append((0, 1, found.value.shape[member]))
            parts.append(found.value.shape[member])
            labels.append((axis, number))
        rest = [each for each in rest if each[0] not in members]
        del left[axis]
    order = tuple(sorted(range(len(labels)), key=lambda k: labels[k]))
    missing = tuple(axis for axis in left if asked[axis] != ZERO)
    return Binding(found.value, tuple(places), tuple(parts), order, shape, missing)


def _axes_of(index: Index, size: int, left: Mapping[int, Index], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Finds the argument's axes that one axis of a value holds."""
    for count in (1, 2, 3):
        for axes in itertools.permutations(left, count):
            if math.prod(shape[a] for a in axes) == size:
                whole = merged([left[a] for a in axes], [shape[a] for a in axes])
                if whole == index:
                    return axes
    return None


def _sliced(index: Index, size: int, left: Mapping[int, Index], shape: Sequence[int]) -> tuple[int, int, int] | None:
    """Finds the argument's axis that is a range of the value's axis; returns it with the range's start and step."""
    for axis, own in left.items():
        if own.digits != index.digits or index.step % own.step:
            continue
        step = index.step // own.step
        start = index.start - step * own.start
        if start >= 0 and start + step * (shape[axis] - 1) < size:
            return axis, start, step
    return None


def _split_axis(place, found: Ref, left: Mapping[int, Index], shape) -> tuple[int, tuple[int, ...]] | None:
    """Finds the argument's axis that neighbouring axes of a value hold, from `place` on; returns it with these axes."""
    last = len(found.indices)
    for axis, own in left.items():
        for end in range(place + 2, last + 1):
            members = tuple(range(place, end))
            if (
                merged([found.indices[m] for m in members], [found.value.shape[m] for m in members]) == own
                and math.prod(found.value.shape[m] for m in members) == shape[axis]
            ):
                return axis, members
    return None
