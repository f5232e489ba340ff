"""Writes HLO instructions as calls of `jax.lax`."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hlo_analysis.errors import HloAnalysisError
from hlo_analysis.hlo import Computation, Instruction, Module, Shape
from hlo_analysis.hlo.attributes import (
    custom_call_target,
    dot_dimensions,
    gemm_config,
    integers,
    slice_strides,
    window,
)
from hlo_analysis.loading import DTYPES


class CannotIsolateError(HloAnalysisError, ValueError):
    """A launch has an operation that cannot be written in JAX."""


PLAIN = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "maximum": "max", "minimum": "min",
    "power": "pow", "remainder": "rem", "exponential": "exp", "exponential-minus-one": "expm1", "log": "log",
    "log-plus-one": "log1p", "logistic": "logistic", "tanh": "tanh", "rsqrt": "rsqrt", "sqrt": "sqrt", "cbrt": "cbrt",
    "negate": "neg", "abs": "abs", "sign": "sign", "floor": "floor", "ceil": "ceil", "cosine": "cos", "sine": "sin",
    "tan": "tan", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not",
    "shift-left": "shift_left", "shift-right-logical": "shift_right_logical", "clamp": "clamp",
    "shift-right-arithmetic": "shift_right_arithmetic", "is-finite": "is_finite", "erf": "erf", "atan2": "atan2",
    "select": "select", "popcnt": "population_count", "count-leading-zeros": "clz", "complex": "complex",
    "real": "real", "imag": "imag",
}  # fmt: skip
"""Operations without attributes: HLO's name and that of `jax.lax`."""
_SCATTERS = {"parameter": "scatter", "add": "scatter_add", "multiply": "scatter_mul", "maximum": "scatter_max",
             "minimum": "scatter_min"}  # fmt: skip
_PAIR = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")


@dataclass(frozen=True, kw_only=True)
class Call:
    """An instruction to be written.

    operands: Python's names of its operands. shapes: theirs. function: writes a computation that it calls as a Python
    function, and returns that one's name.
    """

    module: Module
    it: Instruction
    operands: Sequence[str]
    shapes: Sequence[Shape]
    function: Callable[[Computation], str]

    @property
    def called(self) -> Computation:
        """Returns the computation that it applies."""
        return self.module.computations[self.it.called[0]]


def expression(call: Call) -> str:
    """Returns the instruction as an expression.

    Raises:
        CannotIsolateError: JAX has no function for it.
    """
    it, operands, sizes, given = call.it, call.operands, call.it.shape.dimensions, ", ".join(call.operands)
    first = operands[0] if operands else ""
    match it.opcode:
        case opcode if opcode in PLAIN:
            return f"lax.{PLAIN[opcode]}({given})"
        case "compare":
            return f"lax.{it.attributes['direction'].lower()}({given})"
        case "convert":
            return f"lax.convert_element_type({first}, '{dtype(it.shape)}')"
        case "bitcast-convert" | "bitcast" if call.shapes[0].element_type != it.shape.element_type:
            return _other_type(call)
        case "bitcast":
            return in_order(f"lax.reshape({in_memory(first, call.shapes[0])}, {memory_sizes(it.shape)})", it.shape)
        case "round-nearest-even":
            return f"lax.round({first}, lax.RoundingMethod.TO_NEAREST_EVEN)"
        case "reduce-precision":
            return f"lax.reduce_precision({first}, {it.attributes['exponent_bits']}, {it.attributes['mantissa_bits']})"
        case "constant":
            return f"np.asarray({_literal(it)}, '{dtype(it.shape)}')"
        case "iota":
            return f"lax.broadcasted_iota('{dtype(it.shape)}', {sizes}, {integers(it, 'iota_dimension')[0]})"
        case "broadcast":
            return f"lax.broadcast_in_dim({first}, {sizes}, {integers(it, 'dimensions')})"
        case "reshape":
            return f"lax.reshape({first}, {sizes})"
        case "transpose":
            return f"lax.transpose({first}, {integers(it, 'dimensions')})"
        case "reverse":
            return f"lax.rev({first}, {integers(it, 'dimensions')})"
        case "slice":
            pairs = _PAIR.findall(it.attributes["slice"])
            starts, limits = (tuple(int(pair[end]) for pair in pairs) for end in (0, 1))
            return f"lax.slice({first}, {starts}, {limits}, {slice_strides(it)})"
        case "pad":
            parts = [[int(n) for n in part.split("_")] for part in it.attributes["padding"].split("x")]
            return f"lax.pad({given}, {[tuple([*part, 0][:3]) for part in parts]})"
        case "concatenate":
            return f"lax.concatenate([{given}], {integers(it, 'dimensions')[0]})"
        case "dynamic-slice":
            return f"lax.dynamic_slice({first}, [{', '.join(operands[1:])}], {integers(it, 'dynamic_slice_sizes')})"
        case "dynamic-update-slice":
            return f"lax.dynamic_update_slice({first}, {operands[1]}, [{', '.join(operands[2:])}])"
        case "gather":
            return _gather(call)
        case "scatter" if len(operands) == 3:
            return _scatter(call)
        case "sort":
            return _sort(call)
        case "reduce" | "reduce-window":
            return _reduce(call)
        case "fft":
            return f"lax.fft({first}, '{it.attributes['fft_type']}', {integers(it, 'fft_length')})"
        case "tuple":
            return f"({given},)"
        case "get-tuple-element":
            return f"{first}[{integers(it, 'index')[0]}]"
        case "dot" | "custom-call" if dot_dimensions(it) and _is_plain_product(it):
            return _product(call)
        case "custom-call" if custom_call_target(it) == "__gpu$TopK":
            return f"lax.top_k({first}, {it.shape.elements[0].dimensions[-1]})"
    what = f"{it.opcode} of {custom_call_target(it)}" if it.opcode == "custom-call" else it.opcode
    raise CannotIsolateError(f"{it.name} is a {what}, which JAX has no function for; name another launch, or an edge")


def _other_type(call: Call) -> str:
    """Writes bytes that are read as another type: flat, in the order of memory."""
    before, after = call.shapes[0], call.it.shape
    ratio = math.prod(before.dimensions) // max(1, math.prod(after.dimensions))
    flat = (math.prod(before.dimensions) // ratio, ratio) if ratio > 1 else (math.prod(before.dimensions),)
    text = f"lax.reshape({in_memory(call.operands[0], before)}, {flat})"
    return in_order(f"lax.reshape(lax.bitcast_convert_type({text}, '{dtype(after)}'), {memory_sizes(after)})", after)


def _indices(call: Call) -> str:
    """Writes the indices of a gather or a scatter with their components last, as JAX has them."""
    shape, place = call.shapes[1].dimensions, integers(call.it, "index_vector_dim")[0]
    if place == len(shape):
        return f"lax.reshape({call.operands[1]}, {(*shape, 1)})"
    order = (*(axis for axis in range(len(shape)) if axis != place), place)
    return call.operands[1] if place == len(shape) - 1 else f"lax.transpose({call.operands[1]}, {order})"


def _stated(it: Instruction) -> str:
    """Writes what is known of the indices of a gather or a scatter."""
    known = (name for name in ("indices_are_sorted", "unique_indices") if it.attributes.get(name) == "true")
    return "".join(f", {name}=True" for name in known)


def _numbers(it: Instruction, *names: str) -> str:
    """Writes the dimension numbers of a gather or a scatter, which have one name in HLO and JAX but for one."""
    found = {name: integers(it, name.replace("operand_batching", "input_batching") if it.opcode == "scatter" else name)
             for name in names}  # fmt: skip
    return ", ".join(f"{name}={value}" for name, value in found.items() if value or "batching" not in name)


def _gather(call: Call) -> str:
    numbers = _numbers(
        call.it,
        *("offset_dims", "collapsed_slice_dims", "start_index_map"),
        *("operand_batching_dims", "start_indices_batching_dims"),
    )
    return (
        f"lax.gather({call.operands[0]}, {_indices(call)}, lax.GatherDimensionNumbers({numbers}), "
        f"{integers(call.it, 'slice_sizes')}, mode='clip'{_stated(call.it)})"
    )


def _scatter(call: Call) -> str:
    name = _SCATTERS.get(call.called.root_instruction.opcode)
    if name is None or len(call.called.instructions) > 3:
        raise CannotIsolateError(f"{call.it.name} combines values by more than one operation")
    numbers = _numbers(
        call.it,
        *("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims"),
        *("operand_batching_dims", "scatter_indices_batching_dims"),
    )
    return (
        f"lax.{name}({call.operands[0]}, {_indices(call)}, {call.operands[2]}, "
        f"lax.ScatterDimensionNumbers({numbers}), mode='drop'{_stated(call.it)})"
    )


def _sort(call: Call) -> str:
    compared = call.called.root_instruction
    used = {int(each.literal or 0) // 2 for each in call.called.instructions.values()
            if each.opcode == "parameter" and call.called.users(each.name)}  # fmt: skip
    if "GT" in compared.attributes.get("direction", ""):
        raise CannotIsolateError(f"{call.it.name} sorts in descending order, which JAX has no function for")
    stable, axis = call.it.attributes.get("is_stable") == "true", integers(call.it, "dimensions")[0]
    text = f"lax.sort([{', '.join(call.operands)}], dimension={axis}, is_stable={stable}, num_keys={len(used)})"
    return text if call.it.shape.is_tuple else f"{text}[0]"


def _reduce(call: Call) -> str:
    half = len(call.operands) // 2
    values, starts = (
        parts[0] if half == 1 else f"({', '.join(parts)})" for parts in (call.operands[:half], call.operands[half:])
    )
    function = call.function(call.called)
    if call.it.opcode == "reduce":
        return f"lax.reduce({values}, {starts}, {function}, {integers(call.it, 'dimensions')})"
    rank = len(call.shapes[0].dimensions)
    sizes, strides, pads, base, dilation = _window(call.it, rank)
    return f"lax.reduce_window({values}, {starts}, {function}, {sizes}, {strides}, {pads}, {base}, {dilation})"


def _window(it: Instruction, rank: int) -> tuple[tuple, tuple, tuple, tuple, tuple]:
    """Returns sizes, strides, paddings, and dilations of the input and of the window."""
    found = window(it)
    plain = "x".join(["1"] * rank)
    sizes, strides, base, dilation = (
        tuple(int(part) for part in found.get(name, plain).split("x"))
        for name in ("size", "stride", "lhs_dilate", "rhs_dilate")
    )
    pads = tuple(
        tuple(int(end) for end in part.split("_")) for part in found.get("pad", "x".join(["0_0"] * rank)).split("x")
    )
    return sizes, strides, pads, base, dilation


def _product(call: Call) -> str:
    it, numbers = call.it, dot_dimensions(call.it)
    assert numbers is not None
    batch = integers(it, "rhs_batch_dims")
    if config := gemm_config(it):
        batch = tuple(int(n) for n in config.get("dot_dimension_numbers", {}).get("rhs_batch_dimensions", ()))
    shape = it.shape.elements[0] if it.shape.is_tuple else it.shape
    contracting, batches = (numbers.lhs_contracting, numbers.rhs_contracting), (numbers.lhs_batch, batch)
    text = (
        f"lax.dot_general({call.operands[0]}, {call.operands[1]}, ({contracting}, {batches}), "
        f"preferred_element_type='{dtype(shape)}')"
    )
    return f"({text},)" if it.shape.is_tuple else text


def _is_plain_product(it: Instruction) -> bool:
    if it.opcode == "dot":
        return True
    config = gemm_config(it)
    return (
        config.get("epilogue", "DEFAULT") == "DEFAULT" and not config.get("beta") and config.get("alpha_real", 1) == 1
    )


def _major_to_minor(shape: Shape) -> tuple[int, ...]:
    return tuple(reversed(shape.minor_to_major))


def memory_sizes(shape: Shape) -> tuple[int, ...]:
    """Returns the sizes of the axes in the order in which they lie in memory."""
    return tuple(shape.dimensions[axis] for axis in _major_to_minor(shape))


def in_memory(name: str, shape: Shape) -> str:
    """Writes a value transposed to its physical layout, major to minor."""
    order = _major_to_minor(shape)
    return name if order == tuple(range(len(order))) else f"lax.transpose({name}, {order})"


def in_order(name: str, shape: Shape) -> str:
    """Writes a value that has its axes as they lie in memory with them in the order of its shape."""
    order = _major_to_minor(shape)
    inverse = tuple(sorted(range(len(order)), key=lambda place: order[place]))
    return name if order == inverse == tuple(range(len(order))) else f"lax.transpose({name}, {inverse})"


def dtype(shape: Shape) -> str:
    """Returns the name of a shape's dtype."""
    return DTYPES.get(shape.element_type, shape.element_type)


def _literal(it: Instruction) -> str:
    text = (it.literal or "").strip()
    text = re.sub(r"\btrue\b", "True", re.sub(r"\bfalse\b", "False", text)).replace("{", "[").replace("}", "]")
    text = re.sub(r"/\*.*?\*/", "", text)
    text = re.sub(r"-?\b(inf|nan)\b", lambda found: f"float('{found[0]}')", text)
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        raise CannotIsolateError(f"{it.name}: the module's text leaves its values out") from None
    return text
