"""Removes names that identify the program from a comparison, so that its report can be shared."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hlo_analysis.decisions.categories import CATEGORIES, OTHER_RULE
from hlo_analysis.records import (
    Analysis,
    Comparison,
    Decision,
    Hotspot,
    Intermediate,
    Launch,
    Measured,
    MissedFusion,
    Provenance,
    StrategyResult,
    Trial,
    Value,
)

NOTE = (
    "Names, source lines, HLO, PTX and the compiler's own words were taken out of this report, and with them the notes "
    "on what the capture could not know."
)
WITHHELD = "withheld"

_SHAPE = re.compile(r"\b(?:pred|token|b?f\d\w*|[siuc]\d+)\[[\d,]*\]$")


def redacted(comparison: Comparison) -> Comparison:
    """Returns the comparison without source paths, scope, operation and kernel names, argument names, HLO text and PTX.

    Numbers, shapes, opcodes, categories of reasons, remedies, compiler options and versions stay. Names of strategies
    stay if there are several, unless one contains a path. Each name becomes the same alias everywhere ('part_a/part_b',
    'loop.7'), so scopes still line up and layers still look alike. Code to copy is removed too.
    """
    is_alone = len(comparison.strategies) == 1
    strategies = {
        each.name: f"program{number}" if is_alone or _has_path(each.name) else each.name
        for number, each in enumerate(comparison.strategies, start=1)
    }
    scopes = _Scopes()
    target = next((each.analysis.provenance.target for each in comparison.strategies if each.analysis), "")
    return replace(
        comparison,
        title=f"redacted program, {target}" if target else "redacted program",
        baseline=strategies[comparison.baseline],
        unfused=None if comparison.unfused is None else strategies[comparison.unfused],
        strategies=tuple(_strategy(each, strategies[each.name], scopes) for each in comparison.strategies),
        rows=tuple(
            replace(
                row,
                scope=scopes.alias(row.scope),
                cells=tuple(replace(cell, strategy=strategies[cell.strategy]) for cell in row.cells),
            )
            for row in comparison.rows
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Aliases:
    """Numbers names in the order in which they appear."""

    prefix: str
    known: dict[str, str] = field(default_factory=dict)

    def alias(self, name: str) -> str:
        return self.known.setdefault(name, f"{self.prefix}{len(self.known) + 1}")


class _Scopes:
    """Replaces scopes part by part: 'part_b_12'.

    The numbers in a part stay, so that layers can be told apart and grouped. The alias itself has letters, because
    views treat scopes that differ only in numbers as layers.
    """

    def __init__(self) -> None:
        self._parts: dict[str, str] = {}

    def alias(self, scope: str) -> str:
        return "/".join(map(self._part, scope.split("/"))) if scope else ""

    def _part(self, part: str) -> str:
        numbers = re.findall(r"[0-9]+", part)
        letters = self._parts.setdefault(re.sub(r"[0-9]+", "*", part), _letters(len(self._parts)))
        return "_".join(["part", letters, *numbers])


def _letters(number: int) -> str:
    """Converts a number to letters: 0 → 'a', 25 → 'z', 26 → 'ba'."""
    rest, last = divmod(number, 26)
    return (_letters(rest) if rest else "") + chr(ord("a") + last)


class _Names:
    """Replaces names of instructions and values in one analysis.

    A launch becomes its kind and number. An instruction with a plain opcode name keeps it. Others become 'value.N'.
    """

    def __init__(self, analysis: Analysis) -> None:
        self._launches = {launch.name: f"{launch.kind}.{launch.index}" for launch in analysis.launches}
        self._opcodes = {opcode for launch in analysis.launches for opcode, _ in launch.opcodes}
        self._values = _Aliases(prefix="value.")
        found = sorted(filter(None, self._launches), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, found))) if found else None

    def alias(self, name: str) -> str:
        base, mark, part = name.rpartition("#")  # 'custom-call.1#0' is the first result of that call
        if mark and part.isdecimal():
            return f"{self.alias(base)}#{part}"
        if name in self._launches:
            return self._launches[name]
        opcode, _, number = name.partition(".")
        is_plain = opcode in self._opcodes and (not number or number.isdecimal())
        return name if is_plain else self._values.alias(name)

    def within(self, text: str) -> str:
        """Replaces the names of launches in a text."""
        return text if self._pattern is None else self._pattern.sub(lambda found: self._launches[found[0]], text)


def _strategy(result: StrategyResult, name: str, scopes: _Scopes) -> StrategyResult:
    return replace(
        result,
        name=name,
        description=result.description if name == result.name and not _has_path(result.description) else "",
        error=None if result.error is None else WITHHELD,
        analysis=None if result.analysis is None else _analysis(result.analysis, name, scopes),
        call="",
        sites=tuple(replace(site, source="", reason="") for site in result.sites),
    )


def _analysis(analysis: Analysis, label: str, scopes: _Scopes) -> Analysis:
    names = _Names(analysis)
    kernels, computations = _Aliases(prefix="kernel."), _Aliases(prefix="computation.")

    def values(found: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(replace(value, name=names.alias(value.name)) for value in found)

    def trial(found: Trial | None) -> Trial | None:
        return replace(found, error=WITHHELD) if found and found.error else found

    instead: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(("name", "value"), names.alias),
        **dict.fromkeys(("remedy", "cause"), names.within),
        **dict.fromkeys(("op_name", "hlo", "code"), lambda text: ""),
        **dict.fromkeys(("source", "ptx"), lambda text: None),
        **dict.fromkeys(("inputs", "outputs"), values),
        "computation": computations.alias,
        "scope": scopes.alias,
        "scopes": lambda found: tuple((scopes.alias(scope), phase) for scope, phase in found),
        "trial": trial,
    }

    def cleaned[Record: Launch | Decision | Intermediate | MissedFusion | Hotspot](record: Record) -> Record:
        """Replaces the fields that say something of the program."""
        own = [field.name for field in fields(record) if field.name in instead]
        return replace(record, **{name: instead[name](getattr(record, name)) for name in own})

    def kernel(launch: Launch) -> str | None:
        return None if launch.kernel is None else kernels.alias(launch.kernel)

    def ends(decision: Decision) -> dict[str, str]:
        return {"producer": names.alias(decision.producer), "consumer": names.alias(decision.consumer)}

    return replace(
        analysis,
        label=label,
        provenance=_provenance(analysis.provenance),
        launches=tuple(replace(cleaned(each), kernel=kernel(each)) for each in analysis.launches),
        decisions=tuple(replace(cleaned(each), **ends(each), **_reason(each)) for each in analysis.decisions),
        intermediates=tuple(map(cleaned, analysis.intermediates)),
        missed=tuple(replace(cleaned(each), **_reason(each)) for each in analysis.missed),
        hotspots=tuple(map(cleaned, analysis.hotspots)),
        silent=tuple((names.alias(name), names.within(reason)) for name, reason in analysis.silent),
        measured=None if analysis.measured is None else _measured(analysis.measured, names, kernels),
        ptx=(),
        source_lines=(),
    )


def _reason(record: Decision | MissedFusion) -> dict[str, str]:
    """Returns the category, and its sentence in place of the compiler's words."""
    known = record.category if record.category in CATEGORIES else OTHER_RULE
    return {"category": known, "reason": f"[{CATEGORIES[known]}]"}


def _provenance(provenance: Provenance) -> Provenance:
    arguments = []
    for number, argument in enumerate(provenance.arguments, start=1):
        shape = _SHAPE.search(argument)
        arguments.append(f"argument {number}: {shape[0]}" if shape else f"argument {number}")
    return replace(
        provenance,
        function=WITHHELD,
        arguments=tuple(arguments),
        compiler_options=_without_paths(provenance.compiler_options),
        notes=(NOTE,),
    )


def _measured(measured: Measured, names: _Names, kernels: _Aliases) -> Measured:
    return replace(
        measured,
        source="",
        launches=tuple(
            replace(each, name=names.alias(each.name), kernels=tuple(map(kernels.alias, each.kernels)))
            for each in measured.launches
        ),
        environment=_without_paths(measured.environment),
        notes=(),
    )


def _has_path(text: str) -> bool:
    return "/" in text or "\\" in text


def _without_paths(pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple((name, WITHHELD if _has_path(value) else value) for name, value in pairs)
