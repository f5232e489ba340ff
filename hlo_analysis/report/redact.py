"""Removes names that identify the program from a comparison, so that its report can be shared."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from hlo_analysis.decisions.categories import CATEGORIES, OTHER_RULE
from hlo_analysis.records import (
    Analysis,
    Comparison,
    Decision,
    Hotspot,
    Launch,
    Measured,
    MissedFusion,
    Provenance,
    StrategyResult,
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
    return replace(
        analysis,
        label=label,
        provenance=_provenance(analysis.provenance),
        launches=tuple(_launch(each, names, kernels, computations, scopes) for each in analysis.launches),
        decisions=tuple(_decision(each, names, scopes) for each in analysis.decisions),
        intermediates=tuple(replace(each, name=names.alias(each.name)) for each in analysis.intermediates),
        missed=tuple(_missed(each, names, scopes) for each in analysis.missed),
        hotspots=tuple(_hotspot(each, names, scopes) for each in analysis.hotspots),
        silent=tuple((names.alias(name), names.within(reason)) for name, reason in analysis.silent),
        measured=None if analysis.measured is None else _measured(analysis.measured, names, kernels),
        ptx=(),
        source_lines=(),
    )


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


def _launch(launch: Launch, names: _Names, kernels: _Aliases, computations: _Aliases, scopes: _Scopes) -> Launch:
    def values(all_of_them: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(replace(value, name=names.alias(value.name)) for value in all_of_them)

    return replace(
        launch,
        name=names.alias(launch.name),
        kernel=None if launch.kernel is None else kernels.alias(launch.kernel),
        computation=computations.alias(launch.computation),
        scope=scopes.alias(launch.scope),
        scopes=tuple((scopes.alias(scope), phase) for scope, phase in launch.scopes),
        source=None,
        op_name="",
        inputs=values(launch.inputs),
        outputs=values(launch.outputs),
        hlo="",
        ptx=None,
    )


def _category(category: str) -> tuple[str, str]:
    """Returns the category, and its sentence in place of the compiler's words."""
    known = category if category in CATEGORIES else OTHER_RULE
    return known, f"[{CATEGORIES[known]}]"


def _decision(decision: Decision, names: _Names, scopes: _Scopes) -> Decision:
    category, reason = _category(decision.category)
    return replace(
        decision,
        producer=names.alias(decision.producer),
        consumer=names.alias(decision.consumer),
        category=category,
        reason=reason,
        scope=scopes.alias(decision.scope),
    )


def _missed(missed: MissedFusion, names: _Names, scopes: _Scopes) -> MissedFusion:
    category, reason = _category(missed.category)
    trial = missed.trial
    return replace(
        missed,
        value=names.alias(missed.value),
        category=category,
        reason=reason,
        remedy=names.within(missed.remedy),
        scope=scopes.alias(missed.scope),
        source=None,
        code="",
        trial=replace(trial, error=WITHHELD) if trial and trial.error else trial,
    )


def _hotspot(hotspot: Hotspot, names: _Names, scopes: _Scopes) -> Hotspot:
    trial = hotspot.trial
    return replace(
        hotspot,
        cause=names.within(hotspot.cause),
        remedy=names.within(hotspot.remedy),
        scope=scopes.alias(hotspot.scope),
        source=None,
        code="",
        trial=replace(trial, error=WITHHELD) if trial and trial.error else trial,
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
