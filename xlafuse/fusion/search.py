"""Finds the sites of operations in a graph: values that match a spelling. `reasons` says why others do not."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from xlafuse.fusion.binding import Binding, equations_between, is_permuted, is_whole
from xlafuse.fusion.graph import LAYOUTS, Equation, Graph, Value, build, depends_on
from xlafuse.fusion.match import Failure, Match, Matcher, Pattern
from xlafuse.fusion.near import computes_wide, nearest
from xlafuse.fusion.repeats import Repeats
from xlafuse.fusion.site import NORMS, Refusal, Site
from xlafuse.fusion.spelling import Proposal, Spelling
from xlafuse.fusion.spellings import OPERATIONS
from xlafuse.fusion.terms import primitives_before

TELLING = frozenset((
    "attention", "decode_attention", "rms_norm", "layer_norm", "batch_norm", "softmax", "cross_entropy", "rotation",
    "lora_linear", "dequantized",
))  # fmt: skip
"""Operations that a value may nearly be though no part fitted, since their `needs` and `propose` accept few values."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Attempt:
    """A comparison of a value with a spelling that failed."""

    spelling: Spelling
    pattern: Pattern
    failure: Failure


class Search:
    """Compares a graph's values with spellings.

    attempts: the comparisons that failed, by operation and value. disallowed: what fits a spelling and is refused.
    fitting: the equations of each operation's sites.
    """

    def __init__(self, graph: Graph, allow: frozenset[str]):
        self._graph = graph
        self.allow = allow
        self.attempts: dict[tuple[str, Value], list[Attempt]] = {}
        self.disallowed: list[Refusal] = []
        self.fitting: dict[str, set[Equation]] = {}
        self._primitives: dict[Value, frozenset[str]] = {}
        self._repeats = Repeats(graph)
        self._by_root: dict[str, list[tuple[Value, Value | None]]] = {}
        for value in (value for equation in graph.equations for value in equation.outputs):
            self._by_root.setdefault(value.primitive, []).append((value, self._repeats.first_alike(value)))

    def sites(self, spelling: Spelling) -> Iterator[Site]:
        """Yields all sites of a spelling, which may overlap; repeated layers reuse the sites of the first."""
        found: dict[Value, Site] = {}
        for primitive in sorted(spelling.roots):
            for value, first in self._by_root.get(primitive, ()):
                if first is not None and first not in found:
                    continue
                moved = None if first is None else self._repeats.moved(found[first], value)
                site = moved or self._first_site(spelling, value)
                if site is not None:
                    found[value] = site
                    yield site

    def _first_site(self, spelling: Spelling, value: Value) -> Site | None:
        """Returns the site of the first proposal that fits a value."""
        if not self._has_needs(spelling, value):
            return None
        sites = (self._site(spelling, value, proposal) for proposal in spelling.propose(value))
        return next(filter(None, sites), None)

    def _site(self, spelling: Spelling, value: Value, proposal: Proposal) -> Site | None:
        pattern = _pattern_of(spelling, proposal, value)
        matcher = Matcher(pattern)
        pieces = pieces_of(spelling, value)
        match = matcher.first(value, pieces)
        is_fitting = match is not None and match.arrays.keys() == proposal.arrays.keys()
        if not is_fitting and "rounding" in self.allow and spelling.operation in TELLING and computes_wide(pattern):
            match = nearest(pattern, spelling.floating, value, pieces)
            is_fitting = match is not None and match.only_rounds
        if match is None or not is_fitting:
            attempt = Attempt(spelling=spelling, pattern=pattern, failure=matcher.failure)
            self.attempts.setdefault((spelling.operation, value), []).append(attempt)
            return None
        covered = equations_between(value, match.arrays.values())
        objection = spelling.objection({**proposal.arrays, **proposal.static, **match.numbers})
        if "x" in match.arrays and match.arrays["x"].missing and not objection:
            objection = "x is broadcast to its rows, and the operation would compute each of them again"
        if any(0 in binding.value.shape for binding in match.arrays.values()):
            objection = "an argument has no elements"
        if objection:
            refusal = Refusal(operation=spelling.operation, value=value, reason=objection, covered=frozenset(covered))
            self.disallowed.append(refusal)
            return None
        made = _make_site(self._graph, spelling, value, proposal, match, matcher)
        if isinstance(made, str):
            refusal = Refusal(operation=spelling.operation, value=value, reason=made, covered=frozenset(covered))
            self.disallowed.append(refusal)
            return None
        self.fitting.setdefault(spelling.operation, set()).update(covered)
        return made

    def _has_needs(self, spelling: Spelling, value: Value) -> bool:
        if value not in self._primitives:
            self._primitives[value] = primitives_before(value)
        return spelling.needs <= self._primitives[value]


def is_computed_by(value: Value, taken: frozenset[Equation]) -> bool:
    """Returns whether one of the equations computes a value, up to its layout."""
    while value.equation is not None and value.equation not in taken and value.primitive in LAYOUTS:
        value = value.equation.inputs[0]
    return value.equation in taken


def pieces_of(spelling: Spelling, value: Value) -> tuple[tuple[int, int], ...]:
    """Returns the (offset, stride) on a value's last axis of each piece that a spelling's function returns."""
    return spelling.pieces(value.shape[-1]) if value.shape else ((0, 1),)


def _pattern_of(spelling: Spelling, proposal: Proposal, value: Value) -> Pattern:
    arrays, static = tuple(proposal.arrays.items()), tuple(proposal.static.items())
    return _pattern(spelling, arrays, static, (proposal.order, value.shape), jax.config.jax_enable_x64)


@functools.lru_cache(maxsize=4096)
def _pattern(spelling: Spelling, arrays: Any, static: Any, layout: Any, enable_x64: bool) -> Pattern:
    """Traces a spelling's function to the pattern that a program is matched with.

    layout: the order of the result's axes, and its shape. enable_x64: JAX's setting, for the cache.
    """
    structs = dict(arrays)

    def call(given: dict[str, jax.Array]) -> Any:
        result = spelling.function(**given, **spelling.unknowns, **dict(static))
        order, shape = layout
        own, further = jax.tree.leaves(result), []
        if spelling.further:
            own, further = own[: -spelling.further], own[-spelling.further :]
        shape = (*shape[:-1], shape[-1] // len(own)) if len(own) > 1 else shape
        own = [(each.transpose(order) if is_permuted(order) else each).reshape(shape) for each in own]
        return [*own, *further]

    with jax.default_matmul_precision(None), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        closed = jax.make_jaxpr(call)(structs)
    assert not closed.consts, "a spelling has arrays among its constants"
    operation = OPERATIONS.get(spelling.operation, spelling.operation)
    return Pattern(operation, build(closed.jaxpr), tuple(sorted(structs)), spelling.unknowns)


def _make_site(
    graph: Graph,
    spelling: Spelling,
    value: Value,
    proposal: Proposal,
    match: Match,
    matcher: Matcher,
) -> Site | str:
    """Returns the site, or why it is none."""
    arrays = dict(match.arrays)
    for name in spelling.floating & arrays.keys():
        arrays[name] = _narrowest(arrays[name])
    options = spelling.arguments({**proposal.static, **match.numbers})
    if spelling.refine is not None:
        refined = spelling.refine(arrays, options)
        if isinstance(refined, str):
            return refined
        arrays, options = refined
    results, orders, shared = (value,), (proposal.order,), set()
    covered = equations_between(value, arrays.values())
    if spelling.changed:
        own = _dependent(covered, [arrays[name].value for name in spelling.changed])
        covered, shared = own, covered - own
    if spelling.operation in NORMS and (pair := _summands(arrays)) is not None:
        arrays["x"], arrays["residual"], total = pair
        results, orders = (value, total), (proposal.order, ())
        covered |= equations_between(total, (arrays["x"], arrays["residual"]))
    if spelling.further:
        results += _further(graph, spelling, covered, value, match, matcher)
        orders += ((),) * spelling.further
    return Site(
        operation=spelling.operation,
        arrays=arrays,
        options=options,
        results=results,
        orders=orders,
        covered=frozenset(covered),
        shared=frozenset(shared),
        broadcasting=spelling.broadcasting,
        prepare=spelling.prepare,
        negated=spelling.negated,
    )


def _further(
    graph: Graph, spelling: Spelling, covered: set[Equation], value: Value, match: Match, matcher: Matcher
) -> tuple[Value, ...]:
    """Returns the values of the further results, or new ones that nothing reads."""
    first = len(spelling.pieces(value.shape[-1]))
    inner = [each for equation in covered for each in equation.outputs if each is not value]
    used = [each for each in inner if each in graph.outputs or any(user not in covered for user in each.users)]
    found = []
    for place in range(first, first + spelling.further):
        own = next((each for each in used if each not in found and matcher.further(place, each, match)), None)
        found.append(own or Value(matcher.output(place).aval))
    return tuple(found)


def _narrowest(binding: Binding) -> Binding:
    """Looks through casts that only widen."""
    value = binding.value
    while value.primitive == "convert_element_type" and value.equation is not None:
        inner = value.equation.inputs[0]
        if not jax.numpy.issubdtype(inner.dtype, jax.numpy.floating) or inner.dtype.itemsize > value.dtype.itemsize:
            break
        value = inner
    return replace(binding, value=value)


def _summands(arrays: Mapping[str, Binding]) -> tuple[Binding, Binding, Value] | None:
    """Returns the two sides of the sum that a norm is taken of, and the sum.

    None where `x` is no sum as it is, and where another argument is computed of it.
    """
    x = arrays["x"]
    total = x.value
    if total.primitive != "add" or total.equation is None or x.shape != total.shape or not is_whole(x):
        return None
    if any(value.shape != total.shape or value.literal is not None for value in total.equation.inputs):
        return None
    if any(depends_on(binding.value, {total}) for name, binding in arrays.items() if name != "x"):
        return None
    first, second = (replace(x, value=value) for value in total.equation.inputs)
    return first, second, total


def _dependent(equations: set[Equation], values: Sequence[Value]) -> set[Equation]:
    """Returns the equations that depend on any of the values."""
    found: set[Equation] = set()
    pending = list(values)
    while pending:
        for user in pending.pop().users:
            if user in equations and user not in found:
                found.add(user)
                pending += user.outputs
    return found
