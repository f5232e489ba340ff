"""Says why parts of a program are not operations, in its author's words.

Planning needs none of this: a report asks for it. A value is told by the first of these that it is: the match of a
spelling that is refused; an operation but for a few differences (see `near`); a value of which much matches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xlafuse.fusion.binding import equations_between
from xlafuse.fusion.dropout import is_random
from xlafuse.fusion.graph import Equation, Value, before, behind, is_free
from xlafuse.fusion.layouts import number
from xlafuse.fusion.match import Difference, Match, other_number
from xlafuse.fusion.near import MOST_STEPS, computes_wide, nearest
from xlafuse.fusion.search import TELLING, Attempt, Search, is_computed_by, pieces_of
from xlafuse.fusion.site import Refusal, Site
from xlafuse.fusion.spellings import OPERATIONS
from xlafuse.fusion.terms import BY_ELEMENT
from xlafuse.fusion.words import listed, noun

_LEAST_FITTED = 4
"""A value is told as nearly an operation if at least so many parts fitted, or all but a few differences."""
_REACH = 40
_UNPACKING = frozenset(("shift_right_logical", "shift_right_arithmetic", "shift_left", "bitcast_convert_type"))


def refusals(
    search: Search, sites: Sequence[Site], combining: Sequence[Refusal], overlapping: Sequence[Refusal]
) -> tuple[Refusal, ...]:
    """Returns why values outside the sites are not results of operations, once for each operation and value.

    combining, overlapping: what was refused when sites were combined, and since they overlap.
    """
    taken = frozenset().union(*(site.covered | site.shared for site in sites), *(each.covered for each in combining))
    by_linear, by_others = (
        frozenset().union(*(site.covered for site in sites if (site.operation == "linear") is is_linear))
        for is_linear in (True, False)
    )

    def is_taken(operation: str, value: Value) -> bool:
        """Returns whether a site has a value; what `linear` has, `lora_linear` may have more of."""
        return is_computed_by(value, taken - (by_linear - by_others) if operation == "lora_linear" else taken)

    disallowed = [each for each in search.disallowed if not is_taken(each.operation, each.value)]
    told = {(each.operation, behind(each.value)) for each in disallowed}
    attempts = {
        (operation, value): sorted(own, key=lambda each: -each.failure.fitted)
        for (operation, value), own in search.attempts.items()
        if not is_taken(operation, value) and (operation, behind(value)) not in told
    }
    misses = _apart(list(_misses(attempts, can_round="rounding" not in search.allow)))
    known = frozenset().union(*search.fitting, *(each.covered for each in (*misses, *disallowed)))
    found = [each for each in overlapping if not is_computed_by(each.value, taken)]
    found += [*disallowed, *(miss.refusal() for miss in misses), *_deepest(attempts, known), *_of_few_bits(sites)]
    named: dict[Any, Refusal] = {}
    for each in (*combining, *found):
        if any(each.operation == other.operation and set() < each.covered < other.covered for other in found):
            continue  # a part of what is told of the whole
        operation = OPERATIONS.get(each.operation, each.operation)
        named.setdefault((operation, behind(each.value)), replace(each, operation=operation))
    return tuple(named.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class _Miss:
    """A value that is the result of an operation but for some differences. is_allowed: allow={"rounding"} takes it."""

    operation: str
    value: Value
    match: Match
    covered: frozenset[Equation]
    is_allowed: bool

    @property
    def cost(self) -> tuple[int, bool, int]:
        """Returns a sort key: few differences first, and of as many, those that are allowed, and many equations."""
        weights = {"step": 4, "number": 4, "keeps": 2}
        found = self.match.differences
        once = {each.value if each.kind in ("step", "number") else each.kind: each.kind for each in found}
        return sum(weights.get(kind, 1) for kind in once.values()), not self.is_allowed, -len(self.covered)

    def refusal(self) -> Refusal:
        """Returns the refusal, at the first further step or other number, if there is one."""
        steps = [each.value for each in self.match.differences if each.kind in ("step", "number")]
        place = next((value for value in steps if value.equation is not None), self.value)
        reason = _reason(OPERATIONS.get(self.operation, self.operation), self.match)
        reason += "; allow={'rounding'} takes it" if self.is_allowed else ""
        return Refusal(operation=self.operation, value=place, reason=reason, covered=self.covered)


def _misses(attempts: Mapping[tuple[str, Value], Sequence[Attempt]], *, can_round: bool) -> Iterator[_Miss]:
    """Yields the fewest differences between values and operations, where they are few.

    What a line of the program is not, it is in no layer, and what it nearly is, it is in all: so only the first layer
    is compared with all spellings.
    """
    differing: dict[Any, list[tuple[int, Sequence[Attempt]]]] = {}
    for (operation, value), own in attempts.items():
        if operation not in TELLING and own[0].failure.fitted < _LEAST_FITTED:
            continue
        assert value.equation is not None
        place = value.equation.source.source_info.traceback  # equal for the same instructions of the same calls
        key = (operation, value.primitive, value.shape, value.dtype, place)
        found: list[tuple[_Miss, int, Attempt]] = []
        for steps, some in differing.get(key, [(steps, own) for steps in range(MOST_STEPS + 1)]):
            near = ((_compared(value, each, steps, can_round), steps, each) for each in some)
            found = [(miss, steps, each) for miss, steps, each in near if miss is not None]
            if found:
                break
        best = min(found, key=lambda each: each[0].cost, default=None)
        differing[key] = [] if best is None else [(best[1], [best[2]])]
        if best is not None:
            yield best[0]


def _compared(value: Value, attempt: Attempt, steps: int, can_round: bool) -> _Miss | None:
    """Compares a value once more with a spelling, this time with so many further steps at most."""
    spelling = attempt.spelling
    match = nearest(attempt.pattern, spelling.floating, value, pieces_of(spelling, value), steps=steps)
    if match is None or not match.differences:
        return None
    return _Miss(
        operation=spelling.operation,
        value=value,
        match=match,
        covered=frozenset(equations_between(value, match.arrays.values())),
        is_allowed=can_round and match.only_rounds and computes_wide(attempt.pattern),
    )


def _apart(misses: Sequence[_Miss]) -> list[_Miss]:
    """Chooses misses that do not overlap, those with the fewest differences first."""
    chosen: list[_Miss] = []
    taken: set[Equation] = set()
    for miss in sorted(misses, key=lambda miss: miss.cost):
        own = {equation for equation in miss.covered if not is_free(equation)}
        if not own & taken:
            chosen.append(miss)
            taken |= own
    return chosen


def _deepest(attempts: Mapping[tuple[str, Value], Sequence[Attempt]], known: frozenset[Equation]) -> Iterator[Refusal]:
    """Yields the difference that ended the longest attempt in each part of the program that nothing is said of yet.

    known: the equations that something is said of. A part is what computes a value element by element.
    """
    said = {equation for equation in known if not is_free(equation)}
    for (operation, value), (attempt, *_) in sorted(attempts.items(), key=lambda each: -each[1][0].failure.fitted):
        failure = attempt.failure
        if failure.at is None or failure.fitted < _LEAST_FITTED:
            continue
        part = {each.equation for each in before(value, BY_ELEMENT, _REACH) if each.equation}
        if said.isdisjoint(part):
            said |= {equation for equation in part if not is_free(equation)}
            place = failure.at if failure.at.equation else value
            yield Refusal(operation=operation, value=place, reason=failure.reason)


def _of_few_bits(sites: Sequence[Site]) -> Iterator[Refusal]:
    """Yields the products whose weights are computed from numbers of 8 bits or fewer other than int8."""
    for site in sites:
        for w in (binding.value for name, binding in site.arrays.items() if name.startswith("w")):
            given = (each for each in before(w, BY_ELEMENT | _UNPACKING, _REACH) if each.equation is None)
            packed = next((each for each in given if each.shape and each.dtype.itemsize == 1), None)
            if packed is not None and packed.dtype not in (np.int8, np.bool_):
                what = f"its weights are computed from {packed.dtype}{list(packed.shape)}"
                reason = f"{what}, and quantized_linear takes one int8 for each weight, times scales"
                yield Refusal(operation="quantized_linear", value=w, reason=reason)


def _reason(operation: str, match: Match) -> str:
    """Says what the operation does not do as the program does."""
    options = [f"a {name}" for name in ("bias", "mask", "residual") if name in match.arrays]
    with_options = f"{operation} with {listed(options)}" if options else operation
    found = sorted(match.differences, key=lambda each: each.value.equation.index if each.value.equation else -1)
    steps = [each for each in found if each.kind == "step"]
    parts = []
    if any(map(_drops, steps)):
        what = "weights" if operation == "attention" else "elements"
        parts.append(f"the program drops {what} at random (dropout) inside it, which {operation} does not")
        steps = [each for each in steps if not _drops(each) and _number_beside(each) is None]
    else:
        numbers = [each for each in found if each.kind == "number"]
        kinds = ("product" if each.place else "sum" for each in numbers)
        parts += [other_number(k, each.found, each.wanted, operation) for k, each in zip(kinds, numbers, strict=True)]
    parts += [f"the program also {_step(each)}, which {with_options} does not" for each in steps]
    for kind, verb, rest in (
        ("rounds", "computes", f"{operation} in float32"),
        ("keeps", "keeps", f"{operation} rounds to 16 bits"),
    ):
        if values := [each.value for each in found if each.kind == kind]:
            nouns = listed(list(dict.fromkeys(noun(behind(value)) for value in values)))
            parts.append(f"the program {verb} {nouns} in {values[0].dtype}, and {rest}")
    return "; ".join(dict.fromkeys(parts))


_VERBS = {
    "add": "adds", "sub": "subtracts", "mul": "multiplies by", "div": "divides by",
    "max": "takes the maximum with", "min": "takes the minimum with",
}  # fmt: skip


def _step(step: Difference) -> str:
    """Names a step of the program with the other operand."""
    others, verb = _others(step), _VERBS.get(step.value.primitive)
    if len(others) != 1 or verb is None:
        choice = " (a mask, or a choice)" if step.value.primitive == "select_n" else ""
        return f"applies {noun(step.value)}{choice}"
    constant, array = _number_beside(step), behind(others[0])
    return f"{verb} an array ({array.dtype}{list(array.shape)})" if constant is None else f"{verb} {constant:g}"


def _others(step: Difference) -> list[Value]:
    """Returns the operands of a step beside the one that fits."""
    inputs = step.value.equation.inputs if step.value.equation else ()
    return [each for place, each in enumerate(inputs) if place != step.place]


def _number_beside(step: Difference) -> float | None:
    """Returns the number that a step takes beside the value, as division by the share that dropout keeps does."""
    others = _others(step)
    constant = number(others[0]) if len(others) == 1 else None
    return None if constant is None else float(constant)


def _drops(step: Difference) -> bool:
    """Returns whether a step sets elements to zero at random."""
    return step.value.primitive in ("mul", "select_n") and any(map(is_random, _others(step)))
