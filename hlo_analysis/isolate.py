"""Writes the operations of a few launches as a JAX function of its own: the smallest program with XLA's decision.

The function has the operations that XLA put into the launches, one `jax.lax` call each, in the order and the memory
layout that XLA had when it decided. What other launches compute is an argument. Compiled again, XLA decides anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hlo_analysis.explain import find_edges
from hlo_analysis.hlo import Computation, Instruction, Module, Shape
from hlo_analysis.lax_calls import PLAIN, Call, CannotIsolateError, dtype, expression, in_memory, in_order, memory_sizes
from hlo_analysis.records import Analysis, Launch


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
    ends += [*launch.producers, *(each.index for each in analysis.launches if launch.index in each.producers)]
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


@dataclass(kw_only=True)
class _Writer:
    module: Module
    inside: list[str]
    values: dict[str, str] = field(default_factory=dict)
    """Python's name of each instruction's value."""
    lines: list[str] = field(default_factory=list)
    arguments: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    results: list[tuple[str, Shape]] = field(default_factory=list)
    functions: dict[str, str] = field(default_factory=dict)
    """Python's name of each computation that is written as a function."""

    def text(self) -> str:
        """Returns the function's source."""
        names = ", ".join(f"a{number}" for number in range(len(self.arguments)))
        results = [in_memory(name, shape) for name, shape in self.results if not shape.is_tuple]
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
        name = f"a{len(self.arguments)}"
        self.arguments.append((memory_sizes(shape), dtype(shape)))
        ordered = in_order(name, shape)
        return name if ordered == name else self._new(ordered, "as it lies in memory")

    def _new(self, expression: str, comment: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}  # {comment}")
        return name

    def value(self, instruction: Instruction, operands: Sequence[str], home: Computation) -> str:
        """Writes an instruction; returns the name of its value."""
        if instruction.opcode in ("fusion", "call"):
            return self._body(self.module.computations[instruction.called[0]], operands)
        if instruction.opcode == "copy":
            return operands[0]
        shapes = [home.instructions[operand].shape for operand in instruction.operands]
        call = Call(module=self.module, it=instruction, operands=operands, shapes=shapes, function=self._function)
        return self._new(expression(call), instruction.name)

    def _body(self, body: Computation, operands: Sequence[str]) -> str:
        """Writes the instructions of a computation; returns the name of its result."""
        values: dict[str, str] = {}
        for name, instruction in body.instructions.items():
            if instruction.opcode == "parameter":
                values[name] = operands[int(instruction.literal or 0)]
            else:
                values[name] = self.value(instruction, [values[operand] for operand in instruction.operands], body)
        return values[body.root]

    def _function(self, body: Computation) -> str:
        """Writes a computation that combines two values, or two tuples of them; returns the function's name."""
        root, parameters = body.root_instruction, sum(each.opcode == "parameter" for each in body.instructions.values())
        if root.opcode in PLAIN and len(body.instructions) == parameters + 1 == 3:
            return f"lax.{PLAIN[root.opcode]}"
        if body.name not in self.functions:
            name = self.functions[body.name] = f"combine{len(self.functions)}"
            before, self.lines = self.lines, []
            given = [f"p{number}" for number in range(parameters)]
            result = self._body(body, given)
            unpacked = [] if parameters == 2 else [f"{', '.join(given)} = *x, *y"]
            head = f"def {name}({'p0, p1' if parameters == 2 else 'x, y'}):"
            inner, self.lines = [*unpacked, *self.lines, f"return {result}"], before
            self.lines += [head, *(f"    {line}" for line in inner)]
        return self.functions[body.name]
