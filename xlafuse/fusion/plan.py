"""Plans which equations of a program become calls of operations: finds sites, and chooses some that do not overlap."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from xlafuse.fusion.binding import Binding, constant_argument, is_permuted, is_whole, transposed
from xlafuse.fusion.combine import combined
from xlafuse.fusion.graph import LAYOUTS, Equation, Graph, Value, build, constant, is_free
from xlafuse.fusion.match import Failure, Match, Matcher, Pattern
from xlafuse.fusion.site import Refusal, Site
from xlafuse.fusion.sites import Proposal, Spelling
from xlafuse.fusion.terms import primitives_before

_LEAST_FITTED = 4
"""A refusal is reported if at least so many parts of the operation fitted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The sites of a graph.

    written: sites that XLA computes best, whose equations stay. inner: the plans of the bodies of loops and calls, by
    equation and parameter.
    """

    graph: Graph
    sites: tuple[Site, ...]
    written: tuple[Site, ...]
    refusals: tuple[Refusal, ...]
    inner: Mapping[Equation, Mapping[str, tuple[Plan, ...]]]

    @property
    def changes(self) -> bool:
        """Returns whether there is a site, at any depth."""
        return bool(
            self.sites or any(plan.changes for own in self.inner.values() for plans in own.values() for plan in plans)
        )

    def walk(self) -> Iterator[Plan]:
        """Yields this plan and those inside it."""
        yield self
        for own in self.inner.values():
            for plans in own.values():
                for plan in plans:
                    yield from plan.walk()


_BODIES = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "shard_map": ("jaxpr",),
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
}
"""Primitives whose bodies are rewritten, too. Not `custom_vjp_call`, whose rules belong to its own body."""


def make_plan(
    jaxpr: Any, spellings: Sequence[Spelling], allow: frozenset[str] = frozenset(), ops: Sequence[str] | None = None
) -> Plan:
    """Plans a `Jaxpr`. ops: the operations that it may call; None: all."""
    graph = build(jaxpr)
    search = _Search(graph, allow)
    candidates = [site for spelling in spellings for site in search.sites(spelling)]
    sites, overlapping = _reading_only_results(*_without_overlap(graph, candidates))
    sites, written, combining_refusals = combined(graph, sites, ops)
    inner = {}
    for equation in graph.equations:
        bodies = {}
        for name in _BODIES.get(equation.primitive, ()):
            given = equation.params[name]
            own = given if isinstance(given, tuple | list) else (given,)
            bodies[name] = tuple(make_plan(getattr(body, "jaxpr", body), spellings, allow, ops) for body in own)
        if bodies:
            inner[equation] = bodies
    taken = frozenset().union(*(site.covered | site.shared for site in (*sites, *written)))
    taken |= frozenset().union(*(refusal.covered for refusal in combining_refusals))
    outside = (
        each
        for each in (*search.disallowed, *overlapping, *search.nearest(taken))
        if not _is_computed_by(each.value, taken)
    )
    named: dict[Any, Refusal] = {}
    for each in (*combining_refusals, *outside):
        each = replace(each, operation=_OPERATIONS.get(each.operation, each.operation))
        named.setdefault((each.operation, _origin(each.value).equation), each)
    refusals = [each for each in named.values() if ops is None or each.operation in ops]
    return Plan(graph=graph, sites=sites, written=written, refusals=tuple(refusals), inner=inner)


def _dependent(equations: set[Equation], value: Value) -> set[Equation]:
    """Returns the equations that need a value."""
    found: set[Equation] = set()
    pending = [value]
    while pending:
        for user in pending.pop().users:
            if user in equations and user not in found:
                found.add(user)
                pending += user.outputs
    return found


def _origin(value: Value) -> Value:
    """Returns the value that another one is a layout or a cast of; of an input, its first layout."""
    while value.equation is not None and value.primitive in LAYOUTS and value.equation.inputs[0].equation is not None:
        value = value.equation.inputs[0]
    return value


def _is_computed_by(value: Value, taken: frozenset[Equation]) -> bool:
    """Returns whether one of the equations computes a value, up to its layout."""
    while value.equation is not None and value.equation not in taken and value.primitive in LAYOUTS:
        value = value.equation.inputs[0]
    return value.equation in taken


_OPERATIONS = {"rotation": "rope", "dequantized": "quantized_linear"}
"""The operations that reports name for parts that are none themselves."""


class _Search:
    def __init__(self, graph: Graph, allow: frozenset[str]):
        self._graph = graph
        self._allow = allow
        self._failures: dict[tuple[str, Value, Value], Failure] = {}
        self.disallowed: list[Refusal] = []
        self._primitives: dict[Value, frozenset[str]] = {}
        values = [value for equation in graph.equations for value in equation.outputs]
        self._by_root: dict[str, list[Value]] = {}
        for value in values:
            self._by_root.setdefault(value.primitive, []).append(value)

    def sites(self, spelling: Spelling) -> Iterator[Site]:
        """Yields all sites of a spelling, whether or not they overlap."""
        for primitive in sorted(spelling.roots):
            for value in self._by_root.get(primitive, ()):
                if not self._has_needs(spelling, value):
                    continue
                for proposal in spelling.propose(value):
                    if (site := self._site(spelling, value, proposal)) is not None:
                        yield site
                        break

    def _site(self, spelling: Spelling, value: Value, proposal: Proposal) -> Site | None:
        arrays, static = tuple(proposal.arrays.items()), tuple(proposal.static.items())
        pattern = _pattern(spelling, arrays, static, (proposal.order, value.shape), jax.config.jax_enable_x64)
        matcher = Matcher(pattern)
        match = matcher.first(value, spelling.pieces(value.shape[-1]) if value.shape else ((0, 1),))
        if match is None or match.arrays.keys() != proposal.arrays.keys():
            if spelling.may_be_taken:
                self._record_failure(spelling.operation, value, matcher.failure)
            return None
        if reason := self._objection(spelling, match):
            self.disallowed.append(Refusal(operation=spelling.operation, value=value, reason=reason))
            return None
        if (constants := _constants(spelling, match)) is None:
            return None
        return _make_site(self._graph, spelling, value, proposal, match, constants, matcher)

    def _objection(self, spelling: Spelling, match: Match) -> str:
        """Returns why a match is refused; "" where it is not."""
        if reason := spelling.objection(match.numbers):
            return reason
        if spelling.difference and spelling.allowed_by not in self._allow:
            allowance = f"; allow={{{spelling.allowed_by!r}}} takes it" if spelling.allowed_by is not None else ""
            return spelling.difference + allowance
        if "x" in match.arrays and match.arrays["x"].missing:
            return "x is broadcast to its rows, and the operation would compute each of them again"
        return ""

    def _has_needs(self, spelling: Spelling, value: Value) -> bool:
        if value not in self._primitives:
            self._primitives[value] = primitives_before(value)
        return spelling.needs <= self._primitives[value]

    def _record_failure(self, operation: str, result: Value, failure: Failure) -> None:
        if failure.at is None or failure.fitted < _LEAST_FITTED:
            return
        key = (operation, result, failure.at)
        if key not in self._failures or failure.fitted > self._failures[key].fitted:
            self._failures[key] = failure

    def nearest(self, taken: frozenset[Equation]) -> list[Refusal]:
        """Returns the differences that kept the nearest places, outside the equations taken, from being sites.

        A difference in an argument of the program is told at the place itself. What fits a definition, and is refused
        for another reason, has no differences.
        """
        fitting = {(each.operation, _origin(each.value)) for each in self.disallowed}
        return [
            Refusal(operation=operation, value=at if at.equation else result, reason=failure.reason)
            for (operation, result, at), failure in sorted(self._failures.items(), key=lambda item: -item[1].fitted)
            if not _is_computed_by(result, taken) and (operation, _origin(result)) not in fitting
        ]


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
    return Pattern(build(closed.jaxpr), tuple(sorted(structs)), spelling.unknowns)


def _constants(spelling: Spelling, match: Match) -> dict[str, Any] | None:
    """Returns the options that known arrays become; None where an array is not known, or becomes none."""
    options = {}
    for name, (option, made) in spelling.constants.items():
        binding = match.arrays[name]
        known = constant(binding.value)
        options[option] = None if known is None else made(constant_argument(binding, known))
        if options[option] is None:
            return None
    return options


def _make_site(
    graph: Graph,
    spelling: Spelling,
    value: Value,
    proposal: Proposal,
    match: Match,
    constants: Mapping[str, Any],
    matcher: Matcher,
) -> Site:
    arrays = dict(match.arrays)
    for name in spelling.floating & arrays.keys():
        arrays[name] = _narrowest(arrays[name])
    options = {**spelling.arguments({**proposal.static, **match.numbers}), **constants}
    results, orders, shared = (value,), (proposal.order,), set()
    covered = _equations_between(value, [binding for name, binding in arrays.items() if name not in spelling.constants])
    arrays = {name: binding for name, binding in arrays.items() if name not in spelling.constants}
    if spelling.constants:  # what is computed for several arrays, as the table of a rotation is, is no part of one
        covered, shared = (own := _dependent(covered, arrays["x"].value)), covered - own
    if spelling.operation in ("rms_norm", "layer_norm") and (pair := _summands(arrays["x"])) is not None:
        arrays["x"], arrays["residual"], total = pair
        results, orders = (value, total), (proposal.order, ())
        covered |= _equations_between(total, (arrays["x"], arrays["residual"]))
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


def _summands(x: Binding) -> tuple[Binding, Binding, Value] | None:
    """Returns the two sides of the sum that a norm is taken of, and the sum; None where `x` is no sum as it is."""
    total = x.value
    if total.primitive != "add" or total.equation is None or x.shape != total.shape or not is_whole(x):
        return None
    if any(value.shape != total.shape or value.literal is not None for value in total.equation.inputs):
        return None
    first, second = (replace(x, value=value) for value in total.equation.inputs)
    return first, second, total


def _equations_between(value: Value, arguments: Any) -> set[Equation]:
    """Returns the equations from the arguments to a value."""
    ends = {binding.value for binding in arguments}
    found: set[Equation] = set()
    pending = [value]
    while pending:
        each = pending.pop()
        if each in ends or each.equation is None or each.equation in found:
            continue
        found.add(each.equation)
        pending += each.equation.inputs
    return found


def _without_overlap(graph: Graph, candidates: Sequence[Site]) -> tuple[tuple[Site, ...], list[Refusal]]:
    """Chooses sites that do not overlap, the largest first. Refuses those whose inner values others use."""
    returned = set(graph.outputs)
    chosen: list[Site] = []
    refused: list[Refusal] = []
    taken: set[Equation] = set()
    for site in sorted(candidates, key=_weight, reverse=True):
        own = {equation for equation in site.covered if not is_free(equation)}
        if own & taken:
            continue
        escaping = next((value for value in _inner(site, own) if _escapes(value, site, returned)), None)
        if escaping is not None:
            line = f"; {escaping.primitive} is used elsewhere" if escaping not in returned else "; it is returned, too"
            reason = f"a value inside it, {escaping.dtype}{list(escaping.shape)}, is needed outside{line}"
            refused.append(Refusal(operation=site.operation, value=site.results[0], reason=reason))
            continue
        chosen.append(site)
        taken |= own
    return tuple(chosen), refused


def _reading_only_results(sites: Sequence[Site], refused: list[Refusal]) -> tuple[tuple[Site, ...], list[Refusal]]:
    """Lets sites read other sites' results in place of values inside those sites, which a call does not return.

    Refuses the smaller of two sites where an argument is no layout of a result. sites: the largest first.
    """
    kept, place = list(sites), 0
    while place < len(kept):
        site = kept[place]
        results = {value for each in kept for value in each.results}
        owners = {equation: each for each in kept for equation in each.covered if not is_free(equation)}
        arrays, place = dict(site.arrays), place + 1
        for name, binding in site.arrays.items():
            inner = _equation_computing(binding.value, results)
            producer = None if inner is None else owners.get(inner)
            if producer is None or producer is site:
                continue
            read = _read_as_result(binding, producer)
            if read is None:
                smaller = max(site, producer, key=kept.index)
                reason = f"an argument is a value inside {producer.operation}"
                refused.append(Refusal(operation=smaller.operation, value=smaller.results[0], reason=reason))
                kept.remove(smaller)
                place = 0
                break
            arrays[name] = read
        else:
            kept[place - 1] = replace(site, arrays=arrays)
    return tuple(kept), refused


def _equation_computing(value: Value, results: set[Value]) -> Equation | None:
    """Returns the equation that computes a value, up to its layout; None for a result of a site and for an input."""
    while value not in results and value.equation is not None and is_free(value.equation) and value.equation.inputs:
        value = value.equation.inputs[0]
    return None if value in results else value.equation


def _read_as_result(binding: Binding, producer: Site) -> Binding | None:
    """Returns the argument as the result of the site that computes it, if that is the whole value in another layout."""
    sizes = zip(binding.places, binding.value.shape, strict=True)
    if any((a, b, size or 1) != (0, 1, length) for (a, b, size), length in sizes):
        return None
    for result in producer.results:
        value = result
        while value is not binding.value and value.primitive == "reshape" and value.equation is not None:
            value = value.equation.inputs[0]
        order = tuple(range(len(value.shape)))
        while value is not binding.value and value.primitive == "transpose" and value.equation is not None:
            order = tuple(value.equation.params["permutation"][axis] for axis in order)
            value = value.equation.inputs[0]
        if value is binding.value:
            places = tuple((0, 1, size) for size in result.shape)
            return replace(transposed(binding, order), value=result, places=places)
    return None


def _weight(site: Site) -> tuple[int, int, int]:
    """Weighs a site by its equations; of equal ones, that with the fewest layouts is the larger."""
    work = sum(not is_free(equation) for equation in site.covered)
    casts = sum(equation.primitive == "convert_element_type" for equation in site.covered)
    return work, casts, -len(site.covered)


def _inner(site: Site, own: set[Equation]) -> Iterator[Value]:
    for equation in own:
        yield from (value for value in equation.outputs if value not in site.results)


def _escapes(value: Value, site: Site, returned: set[Value]) -> bool:
    """Returns whether a value inside a site is needed outside it, as it is or in another layout."""
    return value in returned or any(
        user not in site.covered
        or (is_free(user) and any(_escapes(each, site, returned) for each in user.outputs if each not in site.results))
        for user in value.users
    )
