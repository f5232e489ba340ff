"""Formulas for the elements of arrays.

`head` says what computes an element: a sum, a product, a contraction, a reduction, or another primitive, of further
elements. `expand` takes sums and products apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from xlafuse.fusion.graph import Equation, Value, before, frozen
from xlafuse.fusion.indices import ZERO, Index, Indices, split, variables
from xlafuse.fusion.layouts import RULES, Ref, element, number, number_of, operand, peel, transposed, truth

ELEMENTWISE = frozenset([
    "abs", "and", "ceil", "clamp", "complex", "convert_element_type", "cos", "eq", "erf", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "imag", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "ne",
    "neg", "not", "or", "pow", "real", "rem", "round", "select_n", "sign", "sin", "sqrt", "stop_gradient", "tanh",
    "xor",
])  # fmt: skip
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")


@dataclass(frozen=True)
class Head:
    """What computes an element.

    kind: "sum" or "product", whose `parts` are elements with a sign or a power, and `number` the constant among them;
        "literal" (its `number`), "position" (`index`, of an iota), or a primitive's name.
    whole: of a primitive that is not looked into, the element's indices; the parts are then any elements of operands.
    data: parameters that must be equal. bound: variables that the parts have and the element has not.
    """

    kind: str
    dtype: Any
    parts: tuple[tuple[Ref, int], ...] = ()
    number: float = 0.0
    data: Any = ()
    bound: Indices = ()
    index: Index = ZERO
    whole: Indices | None = None


BY_ELEMENT = ELEMENTWISE | RULES.keys() | {"neg", "square", "integer_pow", "rsqrt", "custom_jvp_call"}
_NEAREST = 80


def primitives_before(value: Value) -> frozenset[str]:
    """Returns the primitives that compute a value's elements, back to the nearest reductions and products.

    "sqrt" stands for "rsqrt", too, "sub" for "neg", "concatenate" for "stack", and "outer" for products that contract
    nothing. Only the nearest 80 values are looked at.
    """
    return frozenset(map(_canonical_name, before(value, BY_ELEMENT, _NEAREST)))


def _canonical_name(value: Value) -> str:
    if value.primitive == "dot_general" and value.equation is not None:
        return "dot_general" if value.equation.params["dimension_numbers"][0][0] else "outer"
    return {"rsqrt": "sqrt", "neg": "sub", "stack": "concatenate"}.get(value.primitive, value.primitive)


def expand(kind: str, ref: Ref) -> tuple[list[tuple[Ref, int]], float] | None:
    """Takes a "sum" or a "product" apart by one step, into parts with signs or powers, and a number.

    None where the element is neither a number nor that.
    """
    ref = peel(ref)
    is_sum = kind == "sum"
    if np.issubdtype(ref.value.dtype, np.bool_):
        return None
    if (number := number_of(ref)) is not None:
        return [], float(number)
    match ref.value.primitive:
        case "add" | "sub" if is_sum:
            sign = 1 if ref.value.primitive == "add" else -1
            return [(operand(ref, 0), 1), (operand(ref, 1), sign)], 0.0
        case "reduce_sum" if is_sum and (parts := reduced_parts(ref)):
            return [(part, 1) for part in parts], 0.0
        case "neg":
            return ([(operand(ref, 0), -1)], 0.0) if is_sum else ([(operand(ref, 0), 1)], -1.0)
        case "mul" | "div" if not is_sum:
            power = 1 if ref.value.primitive == "mul" else -1
            return [(operand(ref, 0), 1), (operand(ref, 1), power)], 1.0
        case "convert_element_type" if (negated := _cast_of_negated(ref)) is not None:
            return ([(negated, -1)], 0.0) if is_sum else ([(negated, 1)], -1.0)
        case "square" if not is_sum:
            return [(operand(ref, 0), 1)] * 2, 1.0
        case "integer_pow" if not is_sum and abs(power := _power(ref)) in (1, 2, 3):
            return [(operand(ref, 0), 1 if power > 0 else -1)] * abs(power), 1.0
        case "rsqrt" if not is_sum:
            return [(Ref(_imagined(ref.value, "sqrt", {}), ref.indices), -1)], 1.0
        case "dot_general" if not is_sum and (factor := _factor(ref)) != 1.0:
            return [(Ref(_without_factor(ref.value), ref.indices), 1)], factor
    return None


def reduced_parts(ref: Ref) -> list[Ref]:
    """Takes a reduction along an axis where arrays are joined apart: into one for each array, or the element of one.

    Empty where the operand is not made of joined arrays, element by element.
    """
    equation = ref.value.equation
    if equation is None or len(equation.params["axes"]) != 1 or "range" in equation.params:
        return []
    if "joined" not in ref.value.derived:
        ref.value.derived["joined"] = _joined_sizes(equation)
    (axis,), parts, start = equation.params["axes"], [], 0
    for size in ref.value.derived["joined"]:
        if size == 1:
            own = (*ref.indices[:axis], Index((), start), *ref.indices[axis:])
            parts.append(Ref(equation.inputs[0], own))
        else:
            ranged = {**equation.params, "range": (start, size)}
            name = f"{equation.primitive} of {size} from {start}"
            parts.append(Ref(_imagined(ref.value, equation.primitive, ranged, name=name), ref.indices))
        start += size
    return parts


def _joined_sizes(reduction: Equation) -> tuple[int, ...]:
    (axis,) = reduction.params["axes"]
    whole = element(reduction.inputs[0])
    pending = [whole]
    for ref in pending:
        inner = peel(ref)
        if inner.value.equation is None or len(pending) > _NEAREST:
            continue
        inputs = inner.value.equation.inputs
        if inner.value.primitive == "concatenate":
            dimension = inner.value.equation.params["dimension"]
            if inner.indices[dimension] == whole.indices[axis]:
                return tuple(each.shape[dimension] for each in inputs)
        elif inner.value.primitive in ELEMENTWISE | {"add", "sub", "mul", "div"}:
            pending += [operand(inner, place) for place in range(len(inputs))]
    return ()


def _factor(ref: Ref) -> float:
    """Returns the number that operands of a contraction are multiplied by, in at least 32 bits."""
    assert ref.value.equation is not None
    if ref.value.is_imagined:
        return 1.0
    return math.prod(_without_numbers(element(value))[1] for value in ref.value.equation.inputs)


def _without_numbers(ref: Ref) -> tuple[Ref, float]:
    """Takes the numbers off a product in at least 32 bits; returns what is left, and their product.

    Looks through transpositions only, since whether an element has another layout may depend on its indices.
    """
    factor = 1.0
    while (equation := ref.value.equation) is not None and ref.value.dtype.itemsize >= 4:
        if equation.primitive == "transpose":
            ref = transposed(ref, equation)
            continue
        if equation.primitive not in ("mul", "div"):
            break
        first, second = (number(value) for value in equation.inputs)
        if second is not None:
            factor = factor * float(second) if equation.primitive == "mul" else factor / float(second)
        elif first is not None and equation.primitive == "mul":
            factor *= float(first)
        else:
            break
        ref = operand(ref, 0 if second is not None else 1)
    return ref, factor


def _without_factor(value: Value) -> Value:
    """Returns a contraction whose operands are taken without the numbers that they are multiplied by."""
    assert value.equation is not None
    return _imagined(value, "dot_general", value.equation.params)


def _imagined(
    value: Value, primitive: str, params: dict[str, Any], *, swaps: bool = False, dtype: Any = None, name: str = ""
) -> Value:
    """Returns the value of the same operands by another primitive, which no equation of the program computes.

    name: of what is computed, if primitive and dtype do not tell.
    """
    equation, name = value.equation, name or f"{primitive} {dtype}"
    assert equation is not None
    if name not in value.derived:
        inputs = equation.inputs[::-1] if swaps else equation.inputs
        made = Equation(primitive, params, inputs, equation.source, equation.index)
        aval = value.aval if dtype is None else jax.ShapeDtypeStruct(value.shape, dtype)
        made.outputs = (Value(aval, made, is_imagined=True),)
        value.derived[name] = made.outputs[0]
    return value.derived[name]


def narrowed(contraction: Head) -> Head | None:
    """Removes the casts of 16-bit operands to float32 from a contraction; the products stay exact.

    None where an operand is anything else.
    """
    parts = []
    for ref, sign in contraction.parts:
        ref = peel(ref)
        if ref.value.primitive != "convert_element_type" or ref.value.dtype != np.float32:
            return None
        inner = operand(ref, 0)
        if not jax.numpy.issubdtype(inner.value.dtype, jax.numpy.floating) or inner.value.dtype.itemsize != 2:
            return None
        parts.append((inner, sign))
    return replace(contraction, parts=tuple(parts))


def _power(ref: Ref) -> int:
    assert ref.value.equation is not None
    return ref.value.equation.params["y"]


def _cast_of_negated(ref: Ref) -> Ref | None:
    """Returns the cast of what is negated before a cast to another floating dtype; None for other casts."""
    inner = peel(operand(ref, 0))
    equation = inner.value.equation
    if equation is None or inner.value.primitive != "neg" or not jax.numpy.issubdtype(ref.value.dtype, np.floating):
        return None
    assert ref.value.equation is not None
    made = _imagined(inner.value, "convert_element_type", ref.value.equation.params, dtype=ref.value.dtype)
    return Ref(made, inner.indices)


def _opposite(ref: Ref) -> Ref | None:
    """Returns the opposite of a negated predicate, of one that is a number of 0 or 1, or of a comparison of integers.

    None for others. That of a comparison is "<=".
    """
    ref = peel(ref)
    equation = ref.value.equation
    if equation is None:
        return None
    if equation.primitive == "not":
        return operand(ref, 0)
    if equation.primitive == "eq":
        return truth(ref, equation)
    if equation.primitive not in ("lt", "gt") or not np.issubdtype(equation.inputs[0].dtype, np.integer):
        return None
    return Ref(_imagined(ref.value, "le", {}, swaps=equation.primitive == "lt"), ref.indices)


def _is_zero_or_one(ref: Ref) -> bool:
    """Returns whether a choice gives 0 for False and 1 for True, as a cast does."""
    return (number_of(operand(ref, 1)), number_of(operand(ref, 2))) == (0, 1)


def head(ref: Ref, *, opposites: bool = True) -> Head | None:
    """Returns what computes a peeled element that is no sum or product; None for inputs.

    opposites: whether a choice by `not p` is one by p with its operands swapped.
    """
    value, equation = ref.value, ref.value.equation
    if (number := number_of(ref)) is not None:
        return Head("literal", value.dtype, number=float(number))
    if equation is None:
        return None
    name, params = equation.primitive, equation.params
    if name == "iota":
        return Head("position", None, index=ref.indices[params["dimension"]])
    if name in _REDUCTIONS:
        axes, inner = params["axes"], equation.inputs[0]
        bound = dict(zip(sorted(axes), variables([inner.shape[axis] for axis in sorted(axes)]), strict=True))
        if "range" in params:  # see `reduced_parts`
            start, size = params["range"]
            bound = {axis: Index(variables([size])[0].digits, start) for axis in axes}
        left = iter(ref.indices)
        own = tuple(bound[a] if a in bound else next(left) for a in range(len(inner.shape)))
        return Head(name, value.dtype, ((Ref(inner, own), 1),), bound=tuple(bound.values()))
    if name == "dot_general":
        return _contraction(ref, equation)
    if name == "not" and (inner := peel(operand(ref, 0))).value.primitive in _NEGATED:
        swapped = _NEGATED[inner.value.primitive]
        parts = [(operand(inner, 0), 1), (operand(inner, 1), 1)]
        return Head(swapped[0], value.dtype, tuple(parts[::-1] if swapped[1] else parts))
    is_choice = name == "select_n" and len(equation.inputs) == 3
    if is_choice and opposites and (other := _opposite(operand(ref, 0))) is not None:
        return Head(name, value.dtype, ((other, 1), (operand(ref, 2), 1), (operand(ref, 1), 1)))
    if is_choice and _is_zero_or_one(ref):
        data = (("new_dtype", frozen(value.dtype)),)
        return Head("convert_element_type", value.dtype, ((operand(ref, 0), 1),), data=data)
    if name in _SWAPPED:
        return Head(_SWAPPED[name], value.dtype, ((operand(ref, 1), 1), (operand(ref, 0), 1)))
    if name in ELEMENTWISE:
        data = tuple((key, frozen(each)) for key, each in sorted(params.items()) if key in _MEANINGFUL)
        return Head(name, value.dtype, tuple((operand(ref, k), 1) for k in range(len(equation.inputs))), data=data)
    if name in _WHOLE:
        told = ((key, _told(each)) for key, each in sorted(params.items()) if key not in _HINTS)
        data = (("result", value.position), *told)
        parts = tuple((element(each), 1) for each in equation.inputs)
        return Head(name, value.dtype, parts, data=data, whole=ref.indices)
    if name == "custom_jvp_call" and all(each.shape == value.shape for each in equation.inputs):
        where = params["call_jaxpr"].jaxpr.debug_info.func_src_info
        return Head(
            f"custom_jvp {where}", value.dtype, tuple((operand(ref, k), 1) for k in range(len(equation.inputs)))
        )
    return None


_WHOLE = frozenset(("concatenate", "cumsum", "gather", "ragged_dot_general", "scatter", "scatter-add", "top_k"))
"""Primitives that are not looked into."""
_HINTS = ("indices_are_sorted", "unique_indices", "preferred_element_type", "out_sharding")
_NEGATED = {"le": ("lt", True), "lt": ("le", True), "ge": ("lt", False), "gt": ("le", False)}
_SWAPPED = {"ge": "le", "gt": "lt"}
_MEANINGFUL = ("new_dtype", "y", "rounding_method")
_DEFAULT_PRECISIONS = (
    *("None", "BF16_BF16_F32", "F16_F16_F32"),
    str((jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT)),
)


def _told(parameter: Any) -> str:
    """Returns a parameter's text; "default" for a precision that is one."""
    return "default" if str(parameter) in _DEFAULT_PRECISIONS else str(parameter)


def _is_exact(equation: Any) -> bool:
    """Returns whether a `jax.lax.Precision` changes nothing: products of two 16-bit numbers are exact in float32."""
    given = equation.params["precision"]
    asked = given if isinstance(given, tuple) else (given,)
    operands = (each.dtype for each in equation.inputs)
    return all(isinstance(each, jax.lax.Precision) for each in asked) and all(
        jax.numpy.issubdtype(each, np.floating) and each.itemsize == 2 for each in operands
    )


def _contraction(ref: Ref, equation: Any) -> Head:
    (contract_l, contract_r), (batch_l, batch_r) = equation.params["dimension_numbers"]
    left, right = equation.inputs
    # One variable for all, so that a sum over heads and their columns is one over both joined.
    sizes = [left.shape[axis] for axis in contract_l]
    bound = variables([math.prod(sizes)])
    each = split(bound[0], sizes)
    assert each is not None
    free = iter(ref.indices)
    shared = [next(free) for _ in batch_l]
    own = []
    for value, contract, batch in ((left, contract_l, batch_l), (right, contract_r, batch_r)):
        known = {**dict(zip(contract, each, strict=True)), **dict(zip(batch, shared, strict=True))}
        own.append(Ref(value, tuple(known[a] if a in known else next(free) for a in range(len(value.shape)))))
    if ref.value.is_imagined:
        own = [_without_numbers(part)[0] for part in own]
    # A product that sums nothing is one of elements, which operations compute without rounding the operands.
    precision = _told(equation.params["precision"]) if contract_l and not _is_exact(equation) else "default"
    return Head("dot_general", ref.value.dtype, tuple((part, 1) for part in own), data=precision, bound=bound)
