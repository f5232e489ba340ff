"""Proposes edits of a user's file that put a call of an operation in the place of a site of `xlafuse.fuse`."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from xlafuse.cli.calls import Text, call_text, number_text, own_results
from xlafuse.cli.fingerprints import MARK, Fingerprint, Numbering, Path, graph_numbers
from xlafuse.cli.probes import Marked, Source, Span
from xlafuse.fusion.binding import is_permuted, laid_out, order_of
from xlafuse.fusion.plan import Plan
from xlafuse.fusion.site import Site

_HOMES = ("xlafuse.kernels", "pallas_kernels")
"""Modules that have the operations."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A change of one file.

    replaced: places and the text that each gets. removed: places of lines. imports: names of `xlafuse.kernels` to
    import; "" is the module itself.
    """

    file: str
    replaced: tuple[tuple[Span, Text], ...]
    removed: tuple[Span, ...]
    imports: tuple[str, ...]


def edited(source: Source, edits: Sequence[Edit]) -> bytes:
    """Returns a file's text with edits applied."""
    replaced: dict[Span, Text] = {span: () for each in edits for span in each.removed}
    for each in edits:
        replaced |= dict(each.replaced)
    if lines := _import_lines({name for each in edits for name in each.imports}):
        place = _after_imports(source)
        replaced[place, place] = (lines,)
    return _rendered(source.data, replaced, (0, len(source.data)), frozenset())


def _import_lines(names: Collection[str]) -> str:
    """Returns the import of names of `xlafuse.kernels`, and of it itself where "" is among them."""
    own = ", ".join(sorted(name for name in names if name))
    return ("import xlafuse.kernels\n" if "" in names else "") + (f"from xlafuse.kernels import {own}\n" if own else "")


def _rendered(data: bytes, replaced: Mapping[Span, Text], span: Span, inside: frozenset[Span]) -> bytes:
    """Returns the text at a place. inside: replaced places around it, which are not replaced again."""
    own = sorted(each for each in replaced if span[0] <= each[0] and each[1] <= span[1] and each not in inside)
    own.sort(key=lambda each: (each[0], -each[1]))
    made, at = [], span[0]
    for each in own:
        if each[0] < at:
            continue
        first, last = _whole(data, each)
        whole = (first, last) if _within((first, last), span) else each
        made.append(data[at : whole[0]])
        for part in replaced[each]:
            is_text = isinstance(part, str)
            made.append(part.encode() if is_text else _rendered(data, replaced, part, inside | {each}))
        at = whole[1]
    return b"".join([*made, data[at : span[1]]])


def _after_imports(source: Source) -> int:
    """Returns the place after the imports that a file begins with."""
    body, last = source.tree.body, None
    for place, node in enumerate(body):
        is_docstring = place == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (is_docstring or isinstance(node, ast.Import | ast.ImportFrom)):
            break
        last = node
    lines = source.lines(last) if last is not None else (0, 0)
    return lines[1] if lines else 0


@dataclass(kw_only=True)
class Finder:
    """Finds edits for the sites of a plan, from a trace of the program in which `marked` expressions are marks."""

    numbering: Numbering
    sources: Mapping[str, Source]
    marked: Sequence[Marked]
    trace: Fingerprint
    _held: dict[tuple[Path, int], list[Marked]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for place, each in enumerate(self.marked):
            for key in self.trace.marks.get(f"{MARK}{place}", ()):
                self._held.setdefault(key, []).append(each)

    def edits(self, plan: Plan, inputs: Sequence[int], path: Path = ()) -> Iterator[tuple[Site, tuple[Edit, ...]]]:
        """Yields each site, at any depth, with edits to try. inputs: the numbers of the plan's inputs."""
        values, equations = graph_numbers(self.numbering, plan.graph, inputs)
        for site in sorted(plan.sites, key=lambda site: site.root.index):
            edits = () if site.note else dict.fromkeys(_SiteEdits(self, plan, site, values, path).all())
            yield site, tuple(edits)
        for equation, bodies in plan.inner.items():
            for name, plans in bodies.items():
                given = equation.params[name]
                for place, inner in enumerate(plans):
                    body = given[place] if isinstance(given, tuple | list) else given
                    inside = (*path, (equations[equation], f"{equation.primitive} {name}", place))
                    yield from self.edits(inner, self.numbering.inputs(body), inside)

    def held(self, path: Path, number: int) -> list[Marked]:
        """Returns the evaluations of expressions that hold a value, in order."""
        return self._held.get((path, number), [])


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class _SiteEdits:
    def __init__(self, finder: Finder, plan: Plan, site: Site, values: Mapping[Any, int], path: Path):
        self._finder = finder
        self._outputs = plan.graph.outputs
        self._site = site
        self._values = values
        self._path = path
        self._own = self._results_as_returned()
        self._covered = {
            values[output] for each in site.covered for output in each.outputs if output not in site.results
        }

    def all(self) -> Iterator[Edit]:
        """Yields the edits, those of the innermost function first."""
        result = self._site.results[0]
        if result not in self._values:
            return
        yield from self._at(self._own[0], "")
        if self._own[0] != self._values[result] and len(order := self._site.orders[0]) == result.aval.ndim:
            yield from self._at(self._values[result], f".transpose({', '.join(map(str, order))})")

    def _results_as_returned(self) -> list[int | None]:
        """Numbers the results in the layouts that the operation gives them."""
        found: list[int | None] = []
        for result, order, aval in zip(self._site.results, self._site.orders, own_results(self._site), strict=False):
            number = self._values.get(result)
            order = order or tuple(range(aval.ndim))

            def undone(x: Any, order: Sequence[int] = order, aval: Any = aval) -> Any:
                return x.reshape([aval.shape[axis] for axis in order]).transpose(np.argsort(order))

            found.append(None if number is None else self._finder.numbering.applied(undone, [(number, result.aval)]))
        return found

    def _at(self, number: int | None, suffix: str) -> Iterator[Edit]:
        for place in [] if number is None else self._finder.held(self._path, number):
            source = self._finder.sources[place.file]
            node = source.nodes[place.span]
            if isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.NamedExpr | ast.IfExp):
                continue
            arguments = {name: self._argument(name, place) for name in self._site.arrays}
            if all(text is not None for text in arguments.values()):
                yield from self._replacing(source, place, node, arguments, suffix)

    def _replacing(
        self, source: Source, place: Marked, node: ast.expr, arguments: Mapping[str, Any], suffix: str
    ) -> Iterator[Edit]:
        """Yields edits that replace an expression: without the assignments that nothing reads, and without all."""
        imports: dict[str, None] = {}
        call = (*call_text(self._site, arguments, lambda name: _callee(source, name, imports)), suffix)
        function = source.around(node, *_FUNCTIONS)
        named = [each for each in ast.walk(function) if isinstance(each, ast.Assign) and _name(each) is not None]
        replaced: dict[Span, Text] = {place.span: call}
        anchor, results = source.around(node, ast.stmt), self._site.results
        gone: list[ast.Assign] = []
        if len(results) > 1:
            targets, gone, others = self._further(source, place, node, named)
            if any(target != "_" for target in targets):
                indent = " " * anchor.col_offset
                is_whole = isinstance(anchor, ast.Assign) and anchor.value is node and _name(anchor) is not None
                own = _name(anchor) if is_whole else _unused(function, "y")
                line = (f"{', '.join([str(own), *targets])} = ", *call)
                begin = source.span(anchor)[0]
                if is_whole:
                    replaced = {source.span(anchor): line, **others}
                else:
                    replaced = {place.span: (str(own),), (begin, begin): (*line, f"\n{indent}"), **others}
            else:
                replaced = {place.span: (*call, "[0]")}
        covered = [each for each in named if each is not anchor and self._computes(source, each, place)]
        spans = [part for text in replaced.values() for part in text if not isinstance(part, str)]
        plain = [each for each in named if not any(isinstance(part, ast.Call) for part in ast.walk(each.value))]
        unread = _unread(source, function, [*covered, *plain], gone, [*replaced], spans)
        every = list(dict.fromkeys([*gone, *covered]))
        for removed in (every, unread) if _are_assigned_again(function, every, unread) else (unread, every):
            lines = [source.lines(each) for each in removed]
            if all(lines):
                yield Edit(
                    file=source.file,
                    replaced=tuple(replaced.items()),
                    removed=tuple(sorted(each for each in lines if each)),
                    imports=tuple(imports),
                )

    def _further(
        self, source: Source, place: Marked, node: ast.expr, named: Sequence[ast.Assign]
    ) -> tuple[list[str], list[ast.Assign], dict[Span, Text]]:
        """Returns names for the results after the first, the assignments that give them now, and other expressions."""
        targets: list[str] = []
        gone: list[ast.Assign] = []
        others: dict[Span, Text] = {}
        for result, number in zip(self._site.results[1:], self._own[1:], strict=False):
            spans = {each.span for each in self._held_here(number, place)}
            own = [each for each in named if source.span(each.value) in spans]
            if own:
                targets.append(str(_name(own[-1])))
                gone.append(own[-1])
            elif number is None or (result not in self._outputs and self._site.covered.issuperset(result.users)):
                targets.append("_")
            else:
                targets.append(_unused(source.around(node, *_FUNCTIONS), "total"))
                others |= {span: (targets[-1],) for span in spans if not _within(span, place.span)}
        return targets, gone, others

    def _held_here(self, number: int | None, place: Marked) -> list[Marked]:
        """Returns the evaluations of expressions that hold a value in the same call of the same function."""
        if number is None:
            return []
        return [
            each
            for each in self._finder.held(self._path, number)
            if (each.file, each.frame) == (place.file, place.frame)
        ]

    def _computes(self, source: Source, assignment: ast.Assign, place: Marked) -> bool:
        """Tells whether an assignment holds a value that the call replaces."""
        span = source.span(assignment.value)
        return any(each.span == span for number in self._covered for each in self._held_here(number, place))

    def _argument(self, name: str, place: Marked) -> Text | None:
        """Returns the shortest expression that holds an argument, those inside the replaced one first."""
        binding = self._site.arrays[name]
        value = binding.value
        if value.literal is not None:
            return (number_text(value.literal),)
        if value not in self._values:
            return None
        keeps = name in self._site.broadcasting
        given = [(self._values[value], value.aval)]
        number = self._finder.numbering.applied(lambda x: laid_out(binding, x, keeps_missing=keeps), given)
        if found := self._shortest(number, place):
            return (found,)
        order = order_of(binding)
        if is_permuted(order) and (found := self._shortest(self._values[value], place)):
            return (found, f".transpose({', '.join(map(str, order))})")
        return None

    def _shortest(self, number: int, place: Marked) -> Span | None:
        spans = {each.span for each in self._held_here(number, place)} - {place.span}
        first, last = place.span
        is_outside = {span: not (first <= span[0] and span[1] <= last) for span in spans}
        return min(spans, key=lambda span: (span[1] - span[0] > 40, is_outside[span], span[1] - span[0]), default=None)


def _callee(source: Source, name: str, imports: dict[str, None]) -> str:
    """Returns the expression for a name of `xlafuse.kernels` in a file, and adds the import that it needs."""
    bound = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module in _HOMES and node in source.tree.body:
            if any((each.asname or each.name) == each.name == name for each in node.names):
                return name
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
    if name not in bound:
        imports[name] = None
        return name
    imports[""] = None
    return f"xlafuse.kernels.{name}"


def _name(node: ast.stmt) -> str | None:
    """Returns the one name that a statement assigns; None for other statements."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _unread(
    source: Source,
    function: ast.AST,
    covered: Sequence[ast.Assign],
    gone: Sequence[ast.Assign],
    replaced: Sequence[Span],
    used: Sequence[Span],
) -> list[ast.Assign]:
    """Returns `gone`, and those of the other assignments whose names nothing reads any more."""
    reads = [(each.id, source.span(each)) for each in ast.walk(function) if _is_read(each)]
    before = {name for name, _ in reads}
    gaps = [each for each in replaced if each[0] < each[1]]
    own = {name: [source.span(each) for each in covered if _name(each) == name] for name in before}
    removed = list(gone)
    while True:
        out = [*gaps, *(source.span(each) for each in removed)]
        left = {
            name
            for name, at in reads
            if any(_within(at, each) for each in used) or not any(_within(at, each) for each in (*out, *own[name]))
        }
        more = [each for each in covered if each not in removed and _name(each) in before - left]
        if not more:
            return removed
        removed += more


def _are_assigned_again(function: ast.AST, every: Sequence[ast.Assign], unread: Sequence[ast.Assign]) -> bool:
    """Tells whether the assignments that are not unread have names that are given other values, too."""
    given = [each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    given += [each.arg for each in ast.walk(function) if isinstance(each, ast.arg)]
    return all(given.count(str(_name(each))) > 1 for each in every if each not in unread)


def _is_read(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _within(inner: Span, outer: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _unused(function: ast.AST, name: str) -> str:
    known = {each.id for each in ast.walk(function) if isinstance(each, ast.Name)}
    known |= {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    return next(each for each in (name, *(f"{name}{k}" for k in range(2, 99))) if each not in known)


def _whole(data: bytes, span: Span) -> Span:
    """Returns the place of an expression with the parentheses around it, unless they are those of a call."""
    if span[0] == span[1]:
        return span
    before, after = re.search(rb"\(\s*$", data[: span[0]]), re.match(rb"\s*\)", data[span[1] :])
    if before is None or after is None or not re.search(_BEFORE_PARENTHESES, data[: before.start()]):
        return span
    return before.start(), span[1] + after.end()


_BEFORE_PARENTHESES = rb"([=(,\[{:+\-*/@]|\b(return|in|and|or|not|yield|else|if))\s*$"
"""What stands before parentheses that are not a call's."""
