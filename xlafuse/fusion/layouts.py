"""Elements of arrays, behind whatever only lays arrays out.

A `Ref` is an element of a value at given indices. `peel` moves it through layouts, up to the value that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from xlafuse.fusion.graph import LAYOUTS, Equation, Value
from xlafuse.fusion.indices import ZERO, Index, Indices, reshaped, variables


@dataclass(frozen=True)
class Ref:
    """The element of a value at these indices, one per axis."""

    value: Value
    indices: Indices


def element(value: Value) -> Ref:
    """Returns a value's element at symbolic indices: a new variable for each axis."""
    return Ref(value, variables(value.shape))


def peel(ref: Ref) -> Ref:
    """Returns the same element of the value that computes it, behind all layouts."""
    return peeled(ref)[-1]


def peeled(ref: Ref) -> list[Ref]:
    """Returns an element, and the same one of each value behind its layouts."""
    found = [ref]
    while (inner := _step(found[-1])) is not None:
        found.append(inner)
    return found


def _step(ref: Ref) -> Ref | None:
    equation = ref.value.equation
    rule = RULES.get(ref.value.primitive)
    if equation is None or rule is None:
        return None
    return rule(ref, equation)


def operand(ref: Ref, place: int) -> Ref:
    """Returns the element of an elementwise equation's operand, whose scalars and axes of length 1 are broadcast."""
    assert ref.value.equation is not None
    value = ref.value.equation.inputs[place]
    if not value.shape:
        return Ref(value, ())
    return Ref(value, tuple(i if n != 1 else ZERO for i, n in zip(ref.indices, value.shape, strict=True)))


def number_of(ref: Ref) -> Any:
    """Returns the number that an element is at all indices; None where it depends on arrays."""
    return number(ref.value)


def number(value: Value) -> Any:
    """Returns the number that all elements of a value are, or None."""
    if value.literal is not None or value.equation is None:
        return value.literal
    if "number" not in value.derived:
        value.derived["number"] = _number(value, value.equation)
    return value.derived["number"]


def _number(value: Value, equation: Equation) -> Any:
    name, inputs = equation.primitive, equation.inputs
    if name == "convert_element_type":
        inner = number(inputs[0])
        return None if inner is None else np.asarray(inner).astype(value.dtype)[()]
    if name in LAYOUTS or name == "stop_gradient":
        return number(inputs[0])
    if name == "select_n" and len(inputs) == 3 and (chosen := number(inputs[0])) is not None:
        return number(inputs[1 + int(chosen)])
    if name in _ARITHMETIC and None not in (numbers := [number(each) for each in inputs[:2]]):
        with np.errstate(all="ignore"):
            return np.asarray(_ARITHMETIC[name](*numbers)).astype(value.dtype)[()]
    return None


_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "gt": np.greater,
               "ge": np.greater_equal, "lt": np.less, "le": np.less_equal, "ne": np.not_equal,
               "max": np.maximum, "sqrt": np.sqrt}  # fmt: skip
"""Arithmetic of scalar constants, as `jnp.var` has it."""


def _of_operand(ref: Ref, equation: Any) -> Ref:
    return operand(ref, 0)


def _broadcast(ref: Ref, equation: Any) -> Ref:
    value = equation.inputs[0]
    places = equation.params["broadcast_dimensions"]
    return Ref(value, tuple(ref.indices[p] if n != 1 else ZERO for p, n in zip(places, value.shape, strict=True)))


def _reshape(ref: Ref, equation: Any) -> Ref | None:
    value = equation.inputs[0]
    found = None
    if equation.params.get("dimensions") is None:
        found = reshaped(ref.indices, ref.value.shape, value.shape)
    return None if found is None else Ref(value, found)


def transposed(ref: Ref, equation: Any) -> Ref:
    """Returns the element of a transposition's operand."""
    own = [ZERO] * len(ref.indices)
    for place, axis in enumerate(equation.params["permutation"]):
        own[axis] = ref.indices[place]
    return Ref(equation.inputs[0], tuple(own))


def _squeeze(ref: Ref, equation: Any) -> Ref:
    left = iter(ref.indices)
    gone, rank = equation.params["dimensions"], len(equation.inputs[0].shape)
    return Ref(equation.inputs[0], tuple(ZERO if axis in gone else next(left) for axis in range(rank)))


def _moved(index: Index, start: int, step: int = 1) -> Index:
    return Index(index.digits, start + step * index.start, step * index.step if index.digits else 1)


def _slice(ref: Ref, equation: Any) -> Ref:
    starts = equation.params["start_indices"]
    steps = equation.params["strides"] or (1,) * len(starts)
    return Ref(equation.inputs[0], tuple(map(_moved, ref.indices, map(int, starts), map(int, steps))))


def _split(ref: Ref, equation: Any) -> Ref:
    axis, start = equation.params["axis"], int(sum(equation.params["sizes"][: ref.value.position]))
    own = tuple(_moved(index, start) if place == axis else index for place, index in enumerate(ref.indices))
    return Ref(equation.inputs[0], own)


def _concatenate(ref: Ref, equation: Any) -> Ref | None:
    """Handles elements that come from one operand only."""
    axis = equation.params["dimension"]
    index = ref.indices[axis]
    last = index.start + index.step * (index.size - 1)
    before = 0
    for value in equation.inputs:
        if before <= index.start and last < before + value.shape[axis]:
            own = tuple(_moved(each, -before) if k == axis else each for k, each in enumerate(ref.indices))
            return Ref(value, own)
        before += value.shape[axis]
    return None


def _stack(ref: Ref, equation: Any) -> Ref | None:
    axis = equation.params["axis"]
    if ref.indices[axis].digits:
        return None
    own = tuple(index for place, index in enumerate(ref.indices) if place != axis)
    return Ref(equation.inputs[ref.indices[axis].start], own)


def _convert(ref: Ref, equation: Any) -> Ref | None:
    return operand(ref, 0) if equation.inputs[0].dtype == ref.value.dtype else None


def _gather(ref: Ref, equation: Any) -> Ref | None:
    """Handles `x[:, 0]`, a gather at one constant position."""
    operand_, numbers = equation.inputs[0], equation.params["dimension_numbers"]
    axes = numbers.start_index_map
    if len(axes) != 1 or numbers.operand_batching_dims or numbers.collapsed_slice_dims != axes:
        return None
    position = number_of(Ref(equation.inputs[1], (ZERO,) * len(equation.inputs[1].shape)))
    sizes = [1 if axis in axes else size for axis, size in enumerate(operand_.shape)]
    if position is None or math.prod(equation.inputs[1].shape) != 1 or list(equation.params["slice_sizes"]) != sizes:
        return None
    if not 0 <= position < operand_.shape[axes[0]] or len(numbers.offset_dims) != len(ref.indices):
        return None
    left = iter(ref.indices)
    return Ref(operand_, tuple(Index((), int(position)) if a in axes else next(left) for a in range(len(sizes))))


def _without(*neutral: tuple[int, float]) -> Callable[[Ref, Any], Ref | None]:
    """Makes the rule of an operation that changes nothing where the operand at a place is a certain number."""

    def rule(ref: Ref, equation: Any) -> Ref | None:
        for place, neutral_number in neutral:
            if number(equation.inputs[place]) == neutral_number:
                return operand(ref, 1 - place)
        return None

    return rule


def _choice(ref: Ref, equation: Any) -> Ref | None:
    """Returns what a constant chooses, or the predicate itself where it chooses between False and True."""
    if len(equation.inputs) != 3:
        return None
    if (chosen := number_of(operand(ref, 0))) is not None:
        return operand(ref, 1 + int(chosen))
    if ref.value.dtype != np.bool_:
        return None
    choices = (number_of(operand(ref, 1)), number_of(operand(ref, 2)))
    return operand(ref, 0) if choices == (False, True) else None


def truth(ref: Ref, equation: Any) -> Ref | None:
    """Returns the predicate behind numbers that are compared with 0: where it is False they are 0, else above 0.

    Masks of numbers come to this: `mask != 0` and `mask > 0`.
    """
    if number(equation.inputs[1]) != 0:
        return None
    made = peel(operand(ref, 0))
    while made.value.primitive == "convert_element_type" and made.value.dtype != np.bool_:
        made = peel(operand(made, 0))
    if made.value.dtype == np.bool_:
        return made
    if made.value.equation is None or made.value.primitive != "select_n" or len(made.value.equation.inputs) != 3:
        return None
    off, on = (number_of(operand(made, place)) for place in (1, 2))
    return operand(made, 0) if off == 0 and on is not None and on > 0 else None


def _stop_gradient(ref: Ref, equation: Any) -> Ref | None:
    """Looks through `stop_gradient` of a maximum: what a softmax subtracts has no gradient anyway."""
    inner = peel(operand(ref, 0))
    parts = [inner] if inner.value.primitive != "max" else [peel(operand(inner, place)) for place in (0, 1)]
    return inner if any(each.value.primitive == "reduce_max" for each in parts) else None


RULES: dict[str, Callable[[Ref, Any], Ref | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": transposed,
    "squeeze": _squeeze,
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "stack": _stack,
    "convert_element_type": _convert,
    "copy": _of_operand,
    "copy_p": _of_operand,
    "pvary": _of_operand,
    "sub": _without((1, 0.0)),
    "add": _without((0, 0.0), (1, 0.0)),
    "mul": _without((0, 1.0), (1, 1.0)),
    "div": _without((1, 1.0)),
    "max": _without((0, -np.inf), (1, -np.inf)),
    "and": _without((0, True), (1, True)),
    "or": _without((0, False), (1, False)),
    "select_n": _choice,
    "ne": truth,
    "gt": truth,
    "gather": _gather,
    "stop_gradient": _stop_gradient,
}
"""By primitive, a function that maps an element to the operand's element; it returns None if that does not exist."""
