"""Writes the operations of a few launches as a JAX function of its own: the smallest program with XLA's decision.

The function has the operations that XLA put into the launches, one `jax.lax` call each, in the order and the memory
layout that XLA had when it decided. What other launches compute is an argument. Compiled again, XLA decides anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hlo_analysis.errors import HloAnalysisError
from hlo_analysis.explain import find_edges
from hlo_analysis.hlo import Computation, Instruction, Module, Shape
from hlo_analysis.hlo.attributes import dot_dimensions, gemm_config, integers
from hlo_analysis.loading import DTYPES
from hlo_analysis.records import Analysis, Launch


class CannotIsolateError(HloAnalysisError, ValueError):
    """A launch has an operation that cannot be written in JAX."""


@dataclass(frozen=True, kw_only=True)
class Isolated:
    """A JAX function that computes what some launches do.

    arguments: shape and dtype of each argument. left_out: names of launches around that could not be written.
    """

    source: str
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    left_out: tuple[str, ...] = ()


def isolate(module: Module, wanted: Sequence[Launch], around: Sequence[Launch] = ()) -> Isolated:
    """Writes launches as a JAX function.

    Args:
        module: the final one.
        wanted: launches that must be in it.
        around: launches that should be, their producers and consumers.

    Raises:
        CannotIsolateError: a wanted launch is a library call, a custom kernel, or has an operation that is not known.
    """
    kept, left_out = list(wanted), []
    for launch in around:
        try:
            _write(module, [launch])
            kept.append(launch)
        except CannotIsolateError:
            left_out.append(launch.name)
    writer = _write(module, kept)
    return Isolated(source=writer.text(), arguments=tuple(writer.arguments), left_out=tuple(left_out))


def neighbours(analysis: Analysis, launch: Launch) -> list[Launch]:
    """Returns the launches that a launch reads from and that read it, the other end of the costliest edge first."""
    ends = [each for edge in find_edges(analysis, str(launch.index)) for each in (edge.producer, edge.consumer)]
    ends += [value.producer for value in launch.inputs if value.producer is not None]
    ends += [each.index for each in analysis.launches if launch.index in {value.producer for value in each.inputs}]
    found = (analysis.launches[index] for index in dict.fromkeys(ends) if index != launch.index)
    return [each for each in found if each.computation == launch.computation]


def _write(module: Module, launches: Sequence[Launch]) -> _Writer:
    homes = {launch.computation for launch in launches}
    if len(homes) > 1:
        raise CannotIsolateError("the launches are in different loops or branches")
    home = module.computations[next(iter(homes))]
    names = {launch.name for launch in launches}
    if missing := names - set(home.instructions):
        raise CannotIsolateError(f"the module has no instruction {', '.join(sorted(missing))}")
    writer = _Writer(module=module, inside=_between(home.instructions, names))
    for name, instruction in home.instructions.items():
        if name in writer.inside:
            given = [writer.operand(home.instructions[operand], home) for operand in instruction.operands]
            writer.values[name] = writer.value(instruction, given, home)
    used = {o for name, each in home.instructions.items() if name in writer.inside for o in each.operands}
    writer.results = [
        (writer.values[name], home.instructions[name].shape)
        for name in writer.inside
        if name not in used or any(user not in writer.inside for user in home.users(name)) or home.root == name
    ]
    return writer


_VIEWS = ("get-tuple-element", "bitcast", "tuple")


def _between(instructions: dict[str, Instruction], names: Collection[str]) -> list[str]:
    """Returns the launches' instructions, and views of their results that other launches among them read."""
    inside = set(names)
    for name, instruction in instructions.items():
        if instruction.opcode in _VIEWS and any(operand in inside for operand in instruction.operands):
            inside.add(name)
    return [name for name in instructions if name in inside]


_PLAIN = {
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
_REDUCERS = ("add", "multiply", "maximum", "minimum", "and", "or")
_PAIR = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")


@dataclass(kw_only=True)
class _Writer:
    module: Module
    inside: list[str]
    values: dict[str, str] = field(default_factory=dict)
    """Python's name of each instruction's value."""
    lines: list[str] = field(default_factory=list)
    arguments: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    results: list[tuple[str, Shape]] = field(default_factory=list)

    def text(self) -> str:
        """Returns the function's source."""
        names = ", ".join(f"a{number}" for number in range(len(self.arguments)))
        results = [self._in_memory(name, shape) for name, shape in self.results if not shape.is_tuple]
        tuples = [name for name, shape in self.results if shape.is_tuple]
        returned = ", ".join([*results, *tuples])
        return (
            "\n".join([f"def fn({names}):", *(f"    {line}" for line in self.lines), f"    return {returned}"]) + "\n"
        )

    def operand(self, instruction: Instruction, home: Computation) -> str:
        """Returns the value of an instruction, which is an argument if no launch here computes it."""
        if instruction.name in self.values:
            return self.values[instruction.name]
        if instruction.opcode == "constant" and "..." not in (instruction.literal or "..."):
            made = self.value(instruction, [], home)
        else:
            made = self._argument(instruction.shape)
        self.values[instruction.name] = made
        return made

    def _argument(self, shape: Shape) -> str:
        if shape.is_tuple:
            raise CannotIsolateError("a launch reads a tuple")
        order = _major_to_minor(shape)
        name = f"a{len(self.arguments)}"
        self.arguments.append((tuple(shape.dimensions[axis] for axis in order), _dtype(shape)))
        if order == tuple(range(len(order))):
            return name
        return self._new(f"lax.transpose({name}, {_inverse(order)})", "as it lies in memory")

    def _in_memory(self, name: str, shape: Shape) -> str:
        """Returns a value with its axes in the order in which they lie in memory, as JAX returns arrays."""
        order = _major_to_minor(shape)
        return name if order == tuple(range(len(order))) else f"lax.transpose({name}, {order})"

    def _new(self, expression: str, comment: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}  # {comment}")
        return name

    def value(self, instruction: Instruction, operands: Sequence[str], home: Computation) -> str:
        """Writes an instruction; returns the name of its value."""
        if instruction.opcode in ("fusion", "call"):
            return self._inlined(instruction, operands)
        if instruction.opcode == "copy":
            return operands[0]
        return self._new(self._expression(instruction, operands, home), instruction.name)

    def _inlined(self, caller: Instruction, operands: Sequence[str]) -> str:
        body = self.module.computations[caller.called[0]]
        values: dict[str, str] = {}
        for name, instruction in body.instructions.items():
            if instruction.opcode == "parameter":
                values[name] = operands[int(instruction.literal or 0)]
            else:
                given = [values[operand] for operand in instruction.operands]
                values[name] = self.value(instruction, given, body)
        return values[body.root]

    def _expression(self, it: Instruction, operands: Sequence[str], home: Computation) -> str:
        first, sizes, given = operands[0] if operands else "", it.shape.dimensions, ", ".join(operands)
        match it.opcode:
            case opcode if opcode in _PLAIN:
                return f"lax.{_PLAIN[opcode]}({given})"
            case "compare":
                return f"lax.{it.attributes['direction'].lower()}({given})"
            case "convert":
                return f"lax.convert_element_type({first}, '{_dtype(it.shape)}')"
            case "bitcast-convert":
                return f"lax.bitcast_convert_type({first}, '{_dtype(it.shape)}')"
            case "round-nearest-even":
                return f"lax.round({first}, lax.RoundingMethod.TO_NEAREST_EVEN)"
            case "constant":
                return f"np.asarray({_literal(it)}, '{_dtype(it.shape)}')"
            case "iota":
                return f"lax.broadcasted_iota('{_dtype(it.shape)}', {sizes}, {integers(it, 'iota_dimension')[0]})"
            case "broadcast":
                return f"lax.broadcast_in_dim({first}, {sizes}, {integers(it, 'dimensions')})"
            case "reshape":
                return f"lax.reshape({first}, {sizes})"
            case "transpose":
                return f"lax.transpose({first}, {integers(it, 'dimensions')})"
            case "reverse":
                return f"lax.rev({first}, {integers(it, 'dimensions')})"
            case "bitcast":
                return self._bitcast(it, first, home.instructions[it.operands[0]].shape)
            case "slice":
                parts = [tuple(int(part or 1) for part in found) for found in _PAIR.findall(it.attributes["slice"])]
                starts, limits, strides = zip(*parts, strict=True)
                return f"lax.slice({first}, {starts}, {limits}, {strides})"
            case "pad":
                parts = [[int(n) for n in part.split("_")] for part in it.attributes["padding"].split("x")]
                return f"lax.pad({given}, {[tuple([*part, 0][:3]) for part in parts]})"
            case "concatenate":
                return f"lax.concatenate([{given}], {integers(it, 'dimensions')[0]})"
            case "dynamic-slice":
                sizes = integers(it, "dynamic_slice_sizes")
                return f"lax.dynamic_slice({first}, [{', '.join(operands[1:])}], {sizes})"
            case "dynamic-update-slice":
                return f"lax.dynamic_update_slice({first}, {operands[1]}, [{', '.join(operands[2:])}])"
            case "reduce" if len(operands) == 2:
                return f"lax.reduce({first}, {operands[1]}, lax.{self._reducer(it)}, {integers(it, 'dimensions')})"
            case "tuple":
                return f"({given},)"
            case "get-tuple-element":
                return f"{first}[{integers(it, 'index')[0]}]"
            case "dot" | "custom-call" if dot_dimensions(it) and _is_plain_product(it):
                return self._product(it, operands)
        raise CannotIsolateError(
            f"{it.name} is a {it.opcode}, which cannot be written as a JAX function; name a launch or an edge of "
            "elementwise work, reductions, data movement or plain products"
        )

    def _reducer(self, it: Instruction) -> str:
        root = self.module.computations[it.attributes["to_apply"].lstrip("%")].root_instruction
        if root.opcode not in _REDUCERS:
            raise CannotIsolateError(f"{it.name} reduces by more than one operation")
        return _PLAIN[root.opcode]

    def _bitcast(self, it: Instruction, first: str, source: Shape) -> str:
        """Writes the same bytes under another shape: in the order of memory it is a reshape."""
        if source.element_type != it.shape.element_type:
            raise CannotIsolateError(f"{it.name} reads bytes as another type")
        before, after = _major_to_minor(source), _major_to_minor(it.shape)
        sizes = tuple(it.shape.dimensions[axis] for axis in after)
        text = first if before == tuple(range(len(before))) else f"lax.transpose({first}, {before})"
        text = f"lax.reshape({text}, {sizes})"
        return text if after == tuple(range(len(after))) else f"lax.transpose({text}, {_inverse(after)})"

    def _product(self, it: Instruction, operands: Sequence[str]) -> str:
        numbers = dot_dimensions(it)
        assert numbers is not None
        batch = integers(it, "rhs_batch_dims")
        if config := gemm_config(it):
            batch = tuple(int(n) for n in config.get("dot_dimension_numbers", {}).get("rhs_batch_dimensions", ()))
        shape = it.shape.elements[0] if it.shape.is_tuple else it.shape
        contracting, batches = (numbers.lhs_contracting, numbers.rhs_contracting), (numbers.lhs_batch, batch)
        text = (
            f"lax.dot_general({operands[0]}, {operands[1]}, ({contracting}, {batches}), "
            f"preferred_element_type='{_dtype(shape)}')"
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
    if shape.layout is None or len(shape.layout.minor_to_major) != len(shape.dimensions):
        return tuple(range(len(shape.dimensions)))
    return tuple(reversed(shape.layout.minor_to_major))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=lambda place: order[place]))


def _dtype(shape: Shape) -> str:
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
