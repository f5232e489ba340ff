"""Finds the sites of operations in a graph, and the reasons why other places are none."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from xlafuse.fusion.binding import Binding, constant_argument, equations_between, is_permuted, is_whole
from xlafuse.fusion.graph import LAYOUTS, Equation, Graph, Value, build, constant, is_free
from xlafuse.fusion.match import Failure, Match, Matcher, Pattern
from xlafuse.fusion.near import MOST_STEPS, computes_wide, nearest
from xlafuse.fusion.reasons import OPERATIONS, Miss, apart
from xlafuse.fusion.site import Refusal, Site
from xlafuse.fusion.sites import Proposal, Spelling
from xlafuse.fusion.terms import BY_ELEMENT, primitives_before

_LEAST_FITTED = 4
"""A place is told as nearly an operation if at least so many parts fitted, or all but a few differences."""
_TELLING = frozenset((
    "attention", "rms_norm", "layer_norm", "batch_norm", "softmax", "cross_entropy", "rotation", "lora_linear",
    "dequantized",
))  # fmt: skip
"""Operations that a value may nearly be though no part fitted, since their `needs` and `propose` accept few values."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Attempt:
    """A comparison of a value with a spelling that failed."""

    spelling: Spelling
    proposal: Proposal
    pattern: Pattern
    failure: Failure


class Search:
    """Compares a graph's values with spellings, and keeps what nearly fitted."""

    def __init__(self, graph: Graph, allow: frozenset[str]):
        self._graph = graph
        self._allow = allow
        self._attempts: dict[tuple[str, Value], list[_Attempt]] = {}
        self._disallowed: list[Refusal] = []
        self._fitting: list[set[Equation]] = []
        self._differing: dict[Any, list[tuple[int, list[_Attempt]]]] = {}
        self._primitives: dict[Value, frozenset[str]] = {}
        values = [value for equation in graph.equations for value in equation.outputs]
        self._by_root: dict[str, list[Value]] = {}
        for value in values:
            self._by_root.setdefault(value.primitive, []).append(value)

    def sites(self, spelling: Spelling) -> Iterator[Site]:
        """Yields all sites of a spelling, whether or not they overlap."""
        for value in self._values(spelling):
            for proposal in spelling.propose(value):
                if (site := self._site(spelling, value, proposal)) is not None:
                    yield site
                    break

    def _values(self, spelling: Spelling) -> Iterator[Value]:
        for primitive in sorted(spelling.roots):
            for value in self._by_root.get(primitive, ()):
                if self._has_needs(spelling, value):
                    yield value

    def _site(self, spelling: Spelling, value: Value, proposal: Proposal) -> Site | None:
        pattern = _pattern_of(spelling, proposal, value)
        matcher = Matcher(pattern)
        pieces = _pieces(spelling, value)
        match = matcher.first(value, pieces)
        is_fitting = match is not None and match.arrays.keys() == proposal.arrays.keys()
        if not is_fitting and "rounding" in self._allow and spelling.operation in _TELLING and computes_wide(pattern):
            match = nearest(pattern, spelling.floating, value, pieces, steps=0)
            is_fitting = match is not None and all(each.kind == "rounds" for each in match.differences)
        if match is None or not is_fitting:
            attempt = _Attempt(spelling=spelling, proposal=proposal, pattern=pattern, failure=matcher.failure)
            self._attempts.setdefault((spelling.operation, value), []).append(attempt)
            return None
        constants = _constants(spelling, match)
        objection = self._objection(spelling, match) or (constants if isinstance(constants, str) else "")
        if objection or isinstance(constants, str):
            self._disallow(spelling, value, match, objection)
            return None
        self._fitting.append(equations_between(value, match.arrays.values()))
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

    def refused(
        self, spellings: Sequence[Spelling], taken: frozenset[Equation], of_products: frozenset[Equation]
    ) -> list[Refusal]:
        """Returns what kept values from being results of operations, outside the equations taken.

        First those that fit a spelling which is refused, then those that differ little, then the first difference of
        those of which much fits and of which nothing is said yet. of_products: the equations taken that only `linear`
        takes, of which `lora_linear` may have taken more.
        """

        def is_taken(operation: str, value: Value) -> bool:
            return is_computed_by(value, taken - of_products if operation == "lora_linear" else taken)

        for spelling in spellings:
            if not spelling.may_be_taken:
                for value in self._values(spelling):
                    if not is_taken(spelling.operation, value):
                        self._refuse(spelling, value)
        disallowed = [each for each in self._disallowed if not is_taken(each.operation, each.value)]
        fitting = {(each.operation, origin(each.value)) for each in disallowed}
        left = {
            (operation, value): sorted(attempts, key=lambda each: -each.failure.fitted)
            for (operation, value), attempts in self._attempts.items()
            if not is_taken(operation, value) and (operation, origin(value)) not in fitting
        }
        misses = apart([miss for key, attempts in left.items() if (miss := self._miss(*key, attempts)) is not None])
        known = frozenset().union(*self._fitting, *(each.covered for each in (*misses, *disallowed)))
        deepest: dict[Any, tuple[int, Refusal]] = {}
        for (operation, value), (attempt, *_) in left.items():
            failure = attempt.failure
            if failure.at is None or failure.fitted < _LEAST_FITTED or _reaches(value, known):
                continue
            place = failure.at if failure.at.equation else value
            found = failure.fitted, Refusal(operation=operation, value=place, reason=failure.reason)
            deepest[origin(place)] = max(deepest.get(origin(place), found), found, key=lambda each: each[0])
        return [*disallowed, *(miss.refusal() for miss in misses), *(refusal for _, refusal in deepest.values())]

    def _refuse(self, spelling: Spelling, value: Value) -> None:
        """Notes a value that fits a spelling which is always refused."""
        for proposal in spelling.propose(value):
            match = Matcher(_pattern_of(spelling, proposal, value)).first(value, _pieces(spelling, value))
            if match is not None and match.arrays.keys() == proposal.arrays.keys():
                self._disallow(spelling, value, match, self._objection(spelling, match))
                return

    def _disallow(self, spelling: Spelling, value: Value, match: Match, reason: str) -> None:
        covered = frozenset(equations_between(value, match.arrays.values()))
        self._disallowed.append(Refusal(operation=spelling.operation, value=value, reason=reason, covered=covered))

    def _miss(self, operation: str, value: Value, attempts: Sequence[_Attempt]) -> Miss | None:
        """Returns the fewest differences between a value and an operation; None where there are too many.

        What a line of the program is not, it is in no layer, and what it nearly is, it is in all: so only the first
        layer is compared with all spellings.
        """
        if operation not in _TELLING and attempts[0].failure.fitted < _LEAST_FITTED:
            return None
        assert value.equation is not None
        place = value.equation.source.source_info.traceback  # equal for the same instructions of the same calls
        key = (operation, value.primitive, value.shape, value.dtype, place)
        for steps, own in self._differing.get(key, ((steps, attempts) for steps in range(MOST_STEPS + 1))):
            found = [(miss, each) for each in own if (miss := self._compared(value, each, steps)) is not None]
            if found:
                best, nearest_attempt = min(found, key=lambda pair: pair[0].cost)
                self._differing[key] = [(steps, [nearest_attempt])]
                return best
        self._differing[key] = []
        return None

    def _compared(self, value: Value, attempt: _Attempt, steps: int) -> Miss | None:
        """Compares a value once more with a spelling, this time with so many further steps at most."""
        spelling, pattern = attempt.spelling, attempt.pattern
        match = nearest(pattern, spelling.floating, value, _pieces(spelling, value), steps=steps)
        if match is None or not match.differences:
            return None
        only_rounds = all(each.kind == "rounds" for each in match.differences) and computes_wide(pattern)
        return Miss(
            operation=spelling.operation,
            value=value,
            match=match,
            covered=frozenset(equations_between(value, match.arrays.values())),
            is_allowed=only_rounds and "rounding" not in self._allow,
        )


def _reaches(value: Value, known: frozenset[Equation]) -> bool:
    """Returns whether a value is computed, element by element, of what one of the equations computes."""
    pending, seen = [value], {value}
    while pending and len(seen) < _REACH:
        each = pending.pop(0)
        if each.equation is None:
            continue
        if each.equation in known and not is_free(each.equation):
            return True
        if each.primitive in BY_ELEMENT:
            new = [inner for inner in each.equation.inputs if inner not in seen]
            seen.update(new)
            pending += new
    return False


_REACH = 40


def origin(value: Value) -> Value:
    """Returns the value that another one is a layout or a cast of; of an input, its first layout."""
    while value.equation is not None and value.primitive in LAYOUTS and value.equation.inputs[0].equation is not None:
        value = value.equation.inputs[0]
    return value


def is_computed_by(value: Value, taken: frozenset[Equation]) -> bool:
    """Returns whether one of the equations computes a value, up to its layout."""
    while value.equation is not None and value.equation not in taken and value.primitive in LAYOUTS:
        value = value.equation.inputs[0]
    return value.equation in taken


def _pieces(spelling: Spelling, value: Value) -> tuple[tuple[int, int], ...]:
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


def _constants(spelling: Spelling, match: Match) -> dict[str, Any] | str:
    """Returns the options that known arrays become; the reason where an array is not known, or becomes none."""
    options = {}
    for name, (option, made) in spelling.constants.items():
        binding = match.arrays[name]
        known = constant(binding.value)
        options[option] = None if known is None else made(constant_argument(binding, known))
        if options[option] is None:
            return spelling.unknown
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
    covered = equations_between(value, [binding for name, binding in arrays.items() if name not in spelling.constants])
    arrays = {name: binding for name, binding in arrays.items() if name not in spelling.constants}
    if spelling.constants:  # what is computed for several arrays, as the table of a rotation is, is no part of one
        covered, shared = (own := _dependent(covered, arrays["x"].value)), covered - own
    if spelling.operation in ("rms_norm", "layer_norm") and (pair := _summands(arrays["x"])) is not None:
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


def _summands(x: Binding) -> tuple[Binding, Binding, Value] | None:
    """Returns the two sides of the sum that a norm is taken of, and the sum; None where `x` is no sum as it is."""
    total = x.value
    if total.primitive != "add" or total.equation is None or x.shape != total.shape or not is_whole(x):
        return None
    if any(value.shape != total.shape or value.literal is not None for value in total.equation.inputs):
        return None
    first, second = (replace(x, value=value) for value in total.equation.inputs)
    return first, second, total


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
