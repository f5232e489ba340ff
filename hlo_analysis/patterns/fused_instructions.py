"""What a launch's instructions are made of, by the names of what stands outside it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hlo_analysis.records import Launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    """One instruction of a fusion: for each operand the values from outside that it is made of."""

    opcode: str
    sides: tuple[frozenset[str], ...]


def instructions_inside(launch: Launch) -> tuple[Inner, ...]:
    """The instructions of a launch's text, in order; parameters and the fusion itself left out."""
    outside = re.search(r" fusion\((.*?)\), kind", launch.hlo)
    operands = _names(outside[1]) if outside else []
    made: dict[str, frozenset[str]] = {}
    found: list[Inner] = []
    for name, opcode, text in re.findall(r"%([\w.\-]+) = \S+ ([\w\-]+)\((.*?)\)(?:,|\n|$)", launch.hlo):
        if opcode == "parameter" and text.isdigit() and int(text) < len(operands):
            made[name] = frozenset({operands[int(text)]})
        elif opcode != "fusion":
            shown = () if opcode == "constant" else _names(text)
            sides = tuple(made.get(operand, frozenset({operand})) for operand in shown)
            made[name] = frozenset().union(*sides)
            found.append(Inner(opcode=opcode, sides=sides))
    return tuple(found)


def _names(text: str) -> list[str]:
    return [name.partition("#")[0] for name in re.findall(r"%([\w.\-#]+)", text)]
