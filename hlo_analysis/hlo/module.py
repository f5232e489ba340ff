"""Represents HLO: a module of computations of instructions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hlo_analysis.hlo.lexer import SourceText, unquote
from hlo_analysis.hlo.shape import Shape
from hlo_analysis.hlo.source import Metadata, SourceTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instruction:
    """One instruction. Two instructions are equal only if they are the same object."""

    name: str
    opcode: str
    """The opcode as printed; an asynchronous pair of a plain operation reads 'slice-start' and 'slice-done'."""
    shape: Shape
    operands: tuple[str, ...]
    """Names of the operands, which are instructions of the same computation."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Raw text of each attribute (`calls`, `to_apply`, `kind`, `dimensions`, `backend_config`, ...) except metadata."""
    literal: str | None = None
    """The text between the parentheses of a constant, or the number of a parameter."""
    is_root: bool = False
    metadata: Metadata | None = None
    called: tuple[str, ...] = ()
    """Names of the computations that it calls: fusion, loop, branches, reduction, comparator, ..."""
    source: SourceText = field(repr=False)
    start: int = field(repr=False)
    end: int = field(repr=False)

    @property
    def text(self) -> str:
        """Returns the instruction's text in the module, without indentation."""
        return self.source.text[self.start : self.end]

    @property
    def op_name(self) -> str:
        """Returns JAX's path to the operation, or '' if the text has none."""
        return self.metadata.op_name if self.metadata else ""

    @property
    def backend_config(self) -> dict[str, Any]:
        """Returns the backend's configuration; {} if there is none, or one that is no JSON object."""
        text = self.attributes.get("backend_config")
        return _json_object(text) if text else {}


@lru_cache(maxsize=256)  # an instruction is asked several times in a row; 4 % of an analysis
def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(unquote(text) if text[:1] in ('"', "'") else text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computation:
    """A named list of instructions, in text order: operands come before their users."""

    name: str
    instructions: dict[str, Instruction]
    root: str
    is_entry: bool = False
    source: SourceText = field(repr=False)
    start: int = field(repr=False)
    end: int = field(repr=False)
    _users: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    @property
    def root_instruction(self) -> Instruction:
        """Returns the instruction whose value the computation returns."""
        return self.instructions[self.root]

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """Returns the parameters, ordered by number."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda parameter: int(parameter.literal or 0)))

    def users(self, name: str) -> tuple[str, ...]:
        """Returns the instructions with `name` as an operand, each once, in text order.

        Raises:
            KeyError: the computation has no such instruction.
        """
        if not self._users:
            users: dict[str, dict[str, None]] = {key: {} for key in self.instructions}
            for instruction in self.instructions.values():
                for operand in instruction.operands:
                    users[operand][instruction.name] = None
            self._users.update((key, tuple(value)) for key, value in users.items())
        return self._users[name]

    @property
    def text(self) -> str:
        """Returns the computation's text in the module."""
        return self.source.text[self.start : self.end]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Module:
    """A parsed HLO module."""

    name: str
    attributes: dict[str, str]
    """Raw text of the header's attributes: `entry_computation_layout`, `is_scheduled`, ..."""
    computations: dict[str, Computation]
    """Computations in text order: a computation comes before its callers."""
    entry_name: str
    source: SourceTable = field(repr=False)

    @property
    def instructions(self) -> dict[str, Instruction]:
        """Returns the instructions of all computations by name."""
        return {name: found for each in self.computations.values() for name, found in each.instructions.items()}

    @property
    def entry(self) -> Computation:
        """Returns the computation that a run of the program executes."""
        return self.computations[self.entry_name]


def computation_text(module: Module, name: str) -> str:
    """Returns the original text of a computation.

    Raises:
        KeyError: the module has no such computation.
    """
    return module.computations[name].text
