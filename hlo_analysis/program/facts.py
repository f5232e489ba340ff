"""Holds the instructions that a launch computes as typed facts; patterns match these, never HLO text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

from hlo_analysis.hlo import Instruction, Module
from hlo_analysis.hlo.attributes import custom_call_target
from hlo_analysis.hlo.scope import scope_of
from hlo_analysis.records import Launch, Phase


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """The instructions that a launch computes, and the outside values that they read.

    instructions: by name, in text order: those of the fused computation, or the launched instruction alone.
    launched: the instruction that is launched; None where the module does not have it.
    parameters: for each parameter of the fused computation, the outside value that the fusion passes, by its name in
      the launch's `inputs` (`fusion.43#1` is an element of what `fusion.43` writes).
    """

    instructions: Mapping[str, Instruction] = field(default_factory=dict)
    launched: Instruction | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)

    def of(self, *opcodes: str) -> list[Instruction]:
        """Returns the instructions with one of these opcodes, in text order."""
        return [found for found in self.instructions.values() if found.opcode in opcodes]

    def op_names(self, opcode: str) -> list[str]:
        """Returns JAX's names of the instructions with an opcode, in text order, without empty names."""
        return [found.op_name for found in self.of(opcode) if found.op_name]

    def operand(self, instruction: Instruction, number: int) -> Instruction | None:
        """Returns an operand, or None if it is outside the launch."""
        return self.instructions.get(instruction.operands[number])

    @cached_property
    def root(self) -> Instruction | None:
        """Returns the instruction whose value the launch returns."""
        return next((found for found in self.instructions.values() if found.is_root), self.launched)

    @cached_property
    def targets(self) -> frozenset[str]:
        """Returns the targets of the custom calls."""
        return frozenset(custom_call_target(found) for found in self.of("custom-call"))

    @cached_property
    def all_op_names(self) -> tuple[str, ...]:
        """Returns JAX's names of all instructions, the launched instruction's first."""
        launched = (self.launched,) if self.launched else ()
        return tuple(found.op_name for found in (*launched, *self.instructions.values()) if found.op_name)

    @cached_property
    def phases(self) -> frozenset[Phase]:
        """Returns the phases that the instructions belong to."""
        return frozenset(scope_of(name)[1] for name in self.all_op_names)

    @cached_property
    def origins(self) -> Mapping[str, frozenset[str]]:
        """Maps each instruction to the launches and arguments outside that it is computed from."""
        found: dict[str, frozenset[str]] = {}
        for name, instruction in self.instructions.items():
            if name in self.parameters:
                found[name] = frozenset({_launch(self.parameters[name])})
            else:
                found[name] = frozenset().union(*self._operand_origins(instruction, found))
        return found

    def operand_origins(self, instruction: Instruction) -> tuple[frozenset[str], ...]:
        """Returns, for each operand of an instruction, the launches and arguments outside that it is computed from."""
        return self._operand_origins(instruction, self.origins)

    @staticmethod
    def _operand_origins(instruction: Instruction, origins: Mapping[str, frozenset[str]]) -> tuple[frozenset[str], ...]:
        return tuple(origins.get(name, frozenset({_launch(name)})) for name in instruction.operands)


@dataclass(frozen=True, kw_only=True)
class LaunchRow(Launch):
    """A launch of the analyzed program: its record, and facts that the record does not store.

    needed_us: estimated time of one launch of the best kernel that moves these bytes and computes these products.
    """

    needed_us: float = 0.0
    facts: LaunchFacts = field(default=LaunchFacts(), repr=False, compare=False)

    def record(self) -> Launch:
        """Returns only the record."""
        return Launch(**{found.name: getattr(self, found.name) for found in fields(Launch)})


def maker(launch: LaunchRow, name: str, launches: Sequence[LaunchRow]) -> tuple[LaunchRow, Instruction | None] | None:
    """Returns the launch that writes what another launch reads, and the instruction in it that makes the value.

    Args:
        launch: the reader.
        name: the value's in the reader, as an operand or as a parameter of its fused computation.
        launches: the launch table.
    """
    outside = launch.facts.parameters.get(name, name)
    index = next((value.producer for value in launch.inputs if value.name == outside), None)
    if index is None:
        return None
    facts = launches[index].facts
    root = facts.root
    if root is not None and root.opcode == "tuple":
        root = facts.operand(root, int(outside.partition("#")[2] or 0))
    return launches[index], root


def facts_of(module: Module, instruction: Instruction, sources: Mapping[str, str] | None = None) -> LaunchFacts:
    """Collects the facts about the launch of one instruction.

    sources: operand of the instruction → the value that the operand is a view of.
    """
    if instruction.opcode != "fusion":
        return LaunchFacts(instructions={instruction.name: instruction}, launched=instruction)
    body = module.computations[instruction.called[0]]
    passed = zip(body.parameters, instruction.operands, strict=True)
    return LaunchFacts(
        instructions=body.instructions,
        launched=instruction,
        parameters={parameter.name: (sources or {}).get(operand, operand) for parameter, operand in passed},
    )


def _launch(value: str) -> str:
    """Returns the launch that writes a value, or the argument itself: `fusion.43#1` is an element of `fusion.43`."""
    return value.partition("#")[0]
