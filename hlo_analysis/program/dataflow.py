"""Traces a value through operands, loops and branches to the instruction that wrote its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hlo_analysis.hlo import Computation, Instruction, Module, Shape

VIEWS = frozenset({"bitcast", "reshape", "optimization-barrier", "add-dependency", "domain"})
"""Opcodes whose result, inside a fusion, is the buffer of their one operand."""

CONTROL_FLOW = frozenset({"while", "conditional", "call", "async-start", "async-update", "async-done"})
"""Opcodes that only call other computations. The instructions of those computations are launched."""

_WRAPPERS = frozenset({"call", "async-start", "async-update", "async-done"})

STARTED = {"copy-start": 0, "all-gather-start": 1, "collective-permute-start": 1}
"""Asynchronous starts whose result tuple also holds the operand, with the index of the element that they write."""

Path = tuple[int, ...]
"""Index into a nested tuple, outermost first; () for a value that is not a tuple."""


@dataclass(frozen=True, slots=True)
class Source:
    """One leaf buffer: element `path` of the result of `instruction` in `computation` (or of a parameter)."""

    computation: str
    instruction: str
    path: Path = ()

    @property
    def name(self) -> str:
        """Returns the name as XLA prints it: 'fusion', or 'fusion#1' for an element of its tuple."""
        return "#".join([self.instruction, *map(str, self.path)])


def leaves(shape: Shape, path: Path = ()) -> Iterator[tuple[Path, Shape]]:
    """Yields the array leaves of a shape with their paths, without tokens and opaque values, which hold no data."""
    if shape.is_tuple:
        for index, element in enumerate(shape.elements):
            yield from leaves(element, (*path, index))
    elif not shape.is_token and shape.element_type != "opaque":
        yield path, shape


def leaf_shape(shape: Shape, path: Path) -> Shape:
    """Returns the element of a nested tuple shape at `path`."""
    for index in path:
        shape = shape.elements[index]
    return shape


def trip_count(loop: Instruction) -> int | None:
    """Returns the trip count that XLA found for a `while`, or None."""
    known = loop.backend_config.get("known_trip_count")
    return int(known["n"]) if known else None


def behind_aliases(computation: Computation, instruction: Instruction) -> Instruction:
    """Follows bitcasts, reshapes and other views back to the instruction that made the bytes."""
    while instruction.opcode in VIEWS:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def roots(body: Computation) -> list[tuple[Path, Instruction]]:
    """Returns the results of a fusion: the elements of its root tuple, or the root."""
    root = body.root_instruction
    if root.opcode == "tuple":
        return [((index,), body.instructions[name]) for index, name in enumerate(root.operands)]
    return [((), root)]


class Dataflow:
    """Finds and caches the sources of every value of a module."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._memo: dict[Source, tuple[Source, ...]] = {}

    @cached_property
    def _callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.module.computations.values():
            for instruction in computation.instructions.values():
                if instruction.opcode in CONTROL_FLOW:
                    for name in instruction.called:
                        callers.setdefault(name, []).append((computation, instruction))
        return callers

    def home(self, computation: str) -> str:
        """Returns the entry, loop body or branch in whose order a computation runs, looking through wrappers."""
        while callers := [caller for caller, by in self._callers.get(computation, ()) if by.opcode in _WRAPPERS]:
            computation = callers[0].name
        return computation

    def sources(self, computation: str, instruction: str, path: Path = ()) -> tuple[Source, ...]:
        """Returns the instructions that may have written this leaf, the usual one first.

        A value that a loop carries comes from the loop's body, and on the first iteration from outside the loop. The
        result of a loop that may not run at all has the same two sources. The result of a conditional may come from any
        of its branches. Parameters of the entry and constants are sources too.
        """
        key = Source(computation, instruction, path)
        if key not in self._memo:
            found: dict[Source, None] = {}
            self._follow(key, found, set())
            self._memo[key] = tuple(found)
        return self._memo[key]

    def _follow(self, at: Source, found: dict[Source, None], seen: set[Source]) -> None:
        if at in seen:
            return
        seen.add(at)
        computation = self.module.computations[at.computation]
        steps = self._steps(computation, computation.instructions[at.instruction], at.path)
        if steps is None:
            found[at] = None
        else:
            for step in steps:
                self._follow(step, found, seen)

    def _steps(self, computation: Computation, instruction: Instruction, path: Path) -> list[Source] | None:
        """Goes one step back from a leaf; returns None at the instruction that writes it."""
        match instruction.opcode:
            case "bitcast" | "optimization-barrier" | "add-dependency" | "domain":
                return [Source(computation.name, instruction.operands[0], path)]
            case "get-tuple-element":
                index = int(instruction.attributes["index"])
                return [Source(computation.name, instruction.operands[0], (index, *path))]
            case "tuple" if path:
                return [Source(computation.name, instruction.operands[path[0]], path[1:])]
            case "while":
                before = Source(computation.name, instruction.operands[0], path)
                last = self._root(self._body(instruction).name, path)
                return [last] if trip_count(instruction) else [last, before]
            case "conditional" | "call":
                return [self._root(name, path) for name in instruction.called]
            case "async-done" | "async-update":
                start = instruction
                while start.opcode != "async-start" and start.operands:
                    start = computation.instructions[start.operands[0]]
                return [self._root(name, path) for name in start.called] or None
            case "copy-done" | "all-gather-done" | "collective-permute-done" | "all-reduce-done":
                element = STARTED.get(instruction.opcode.replace("-done", "-start"))
                start_path = path if element is None else (element, *path)
                return [Source(computation.name, instruction.operands[0], start_path)]
            case "parameter":
                return self._arguments(computation, int(instruction.literal or 0), path)
        return None

    def _body(self, loop: Instruction) -> Computation:
        return self.module.computations[loop.attributes["body"].lstrip("%")]

    def _root(self, name: str, path: Path) -> Source:
        return Source(name, self.module.computations[name].root, path)

    def _arguments(self, callee: Computation, number: int, path: Path) -> list[Source] | None:
        """Returns the arguments that callers pass for a parameter; None for parameters of the entry or of a fusion."""
        steps: list[Source] = []
        for computation, instruction in self._callers.get(callee.name, ()):
            if instruction.opcode == "while":
                body = self._body(instruction)
                steps.append(Source(body.name, body.root, path))
                operand = instruction.operands[0]
            elif instruction.opcode == "conditional":
                operand = instruction.operands[1 + instruction.called.index(callee.name)]
            elif instruction.opcode in ("call", "async-start"):
                operand = instruction.operands[number]
            else:
                continue
            steps.append(Source(computation.name, operand, path))
        return steps or None
