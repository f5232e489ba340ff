"""What a launch computes, as typed instructions: patterns are matched on these, never on HLO text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

from hlo_analysis.hlo import Instruction, Module
from hlo_analysis.hlo.attributes import custom_call_target
from hlo_analysis.hlo.scope import scope_of
from hlo_analysis.records import Launch, Phase


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """The instructions that a launch computes, and the values outside it that they read.

    instructions: by name, in text order. Of a fusion those of its fused computation, else the launched one alone.
    launched: the instruction that is launched; None where the module does not have it.
    parameters: for each parameter of the fused computation the value outside that the fusion passes.
    """

    instructions: Mapping[str, Instruction] = field(default_factory=dict)
    launched: Instruction | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)

    def of(self, *opcodes: str) -> list[Instruction]:
        """Returns the instructions with one of these opcodes, in text order."""
        return [found for found in self.instructions.values() if found.opcode in opcodes]

    def op_names(self, opcode: str) -> list[str]:
        """Returns JAX's names of the instructions with an opcode, in text order; those without a name are left out."""
        return [found.op_name for found in self.of(opcode) if found.op_name]

    def operand(self, instruction: Instruction, number: int) -> Instruction | None:
        """Returns an operand, None where it stands outside the launch."""
        return self.instructions.get(instruction.operands[number])

    @cached_property
    def root(self) -> Instruction | None:
        """The instruction whose value the launch returns."""
        return next((found for found in self.instructions.values() if found.is_root), self.launched)

    @cached_property
    def targets(self) -> frozenset[str]:
        """Targets of the custom calls."""
        return frozenset(custom_call_target(found) for found in self.of("custom-call"))

    @cached_property
    def all_op_names(self) -> tuple[str, ...]:
        """JAX's names of all instructions, the launched one's first."""
        launched = (self.launched,) if self.launched else ()
        return tuple(found.op_name for found in (*launched, *self.instructions.values()) if found.op_name)

    @cached_property
    def phases(self) -> frozenset[Phase]:
        """Phases that the instructions belong to."""
        return frozenset(scope_of(name)[1] for name in self.all_op_names)

    @cached_property
    def origins(self) -> Mapping[str, frozenset[str]]:
        """For each instruction the values outside the launch that it is computed from."""
        found: dict[str, frozenset[str]] = {}
        for name, instruction in self.instructions.items():
            if name in self.parameters:
                found[name] = frozenset({self.parameters[name]})
            else:
                found[name] = frozenset().union(*self._operand_origins(instruction, found))
        return found

    def operand_origins(self, instruction: Instruction) -> tuple[frozenset[str], ...]:
        """For each operand of an instruction the values outside the launch that it is computed from."""
        return self._operand_origins(instruction, self.origins)

    @staticmethod
    def _operand_origins(instruction: Instruction, origins: Mapping[str, frozenset[str]]) -> tuple[frozenset[str], ...]:
        return tuple(origins.get(name, frozenset({_value(name)})) for name in instruction.operands)


@dataclass(frozen=True, kw_only=True)
class LaunchRow(Launch):
    """A launch of the program under analysis: its record, and the facts that the record leaves out."""

    facts: LaunchFacts = field(default=LaunchFacts(), repr=False, compare=False)

    def record(self) -> Launch:
        """Returns the record alone."""
        return Launch(**{found.name: getattr(self, found.name) for found in fields(Launch)})


def facts_of(module: Module, instruction: Instruction) -> LaunchFacts:
    """Collects the facts of the launch of one instruction."""
    if instruction.opcode != "fusion":
        return LaunchFacts(instructions={instruction.name: instruction}, launched=instruction)
    body = module.computations[instruction.called[0]]
    passed = zip(body.parameters, instruction.operands, strict=True)
    return LaunchFacts(
        instructions=body.instructions,
        launched=instruction,
        parameters={parameter.name: _value(operand) for parameter, operand in passed},
    )


def _value(operand: str) -> str:
    """The value that an operand is, or is an element of: `fusion.43#1` is one of `fusion.43`."""
    return operand.partition("#")[0]
