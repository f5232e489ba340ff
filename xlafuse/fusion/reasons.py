"""Says why parts of a program are not operations, in its author's words.

Planning needs none of this: a report asks for it. A value is told by the first of these that it is: the match of a
spelling that is refused; an operation but for rounding (see `near`); a value of which much matches, with the difference
that ended the longest comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from xlafuse.fusion.binding import equations_between
from xlafuse.fusion.graph import Equation, Value, before, behind, is_free
from xlafuse.fusion.match import Difference
from xlafuse.fusion.near import computes_wide, nearest
from xlafuse.fusion.search import TELLING, Attempt, Search, is_computed_by, pieces_of
from xlafuse.fusion.site import Refusal, Site
from xlafuse.fusion.spellings import OPERATIONS
from xlafuse.fusion.terms import BY_ELEMENT
from xlafuse.fusion.words import listed, noun

_LEAST_FITTED = 4
"""A value is told as nearly an operation if at least so many parts fitted; of `TELLING`, if any did."""
_REACH = 40


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
    rounded = list(_rounded(attempts, can_round="rounding" not in search.allow))
    known = {**search.fitting, "": set[Equation]().union(*(each.covered for each in (*rounded, *disallowed)))}
    found = [each for each in overlapping if not is_computed_by(each.value, taken)]
    found += [*disallowed, *rounded, *_deepest(attempts, known)]
    named: dict[Any, Refusal] = {}
    for each in (*combining, *found):
        if any(each.operation == other.operation and set() < each.covered < other.covered for other in found):
            continue  # a part of what is told of the whole
        operation = OPERATIONS.get(each.operation, each.operation)
        named.setdefault((operation, behind(each.value)), replace(each, operation=operation))
    return tuple(named.values())


def _rounded(attempts: Mapping[tuple[str, Value], Sequence[Attempt]], *, can_round: bool) -> Iterator[Refusal]:
    """Yields values that are results of operations but for rounding, and do not overlap; the largest first."""
    found: list[tuple[tuple[bool, int], Refusal]] = []
    for (operation, value), own in attempts.items():
        if _fits_little(operation, own):
            continue
        for attempt in own:
            match = nearest(attempt.pattern, attempt.spelling.floating, value, pieces_of(attempt.spelling, value))
            if match is None or not match.differences:
                continue
            covered = frozenset(equations_between(value, match.arrays.values()))
            is_allowed = can_round and match.only_rounds and computes_wide(attempt.pattern)
            reason = _rounding_reason(OPERATIONS.get(operation, operation), match.differences)
            reason += "; allow={'rounding'} takes it" if is_allowed else ""
            refusal = Refusal(operation=operation, value=value, reason=reason, covered=covered)
            found.append(((not is_allowed, -len(covered)), refusal))
    taken: set[Equation] = set()
    for _, refusal in sorted(found, key=lambda each: each[0]):
        own_equations = {equation for equation in refusal.covered if not is_free(equation)}
        if not own_equations & taken:
            taken |= own_equations
            yield refusal


def _fits_little(operation: str, attempts: Sequence[Attempt]) -> bool:
    return operation not in TELLING and attempts[0].failure.fitted < _LEAST_FITTED


def _deepest(
    attempts: Mapping[tuple[str, Value], Sequence[Attempt]], known: Mapping[str, set[Equation]]
) -> Iterator[Refusal]:
    """Yields the difference that ended the longest attempt in each part of the program that nothing is said of yet.

    known: the equations that something is said of, by operation. A part is what computes a value element by element.
    """
    said = {each for name, own in known.items() if name != "linear" for each in own if not is_free(each)}
    linear = {each for each in known.get("linear", ()) if not is_free(each)}
    for (operation, value), (attempt, *_) in sorted(attempts.items(), key=lambda each: -each[1][0].failure.fitted):
        failure = attempt.failure
        if failure.at is None or _fits_little(operation, (attempt,)):
            continue
        part = {each.equation for each in before(value, BY_ELEMENT, _REACH) if each.equation}
        if said.isdisjoint(part) and (operation == "lora_linear" or linear.isdisjoint(part)):
            said |= {equation for equation in part if not is_free(equation)}
            place = failure.at if failure.at.equation else value
            yield Refusal(operation=operation, value=place, reason=failure.reason)


def _rounding_reason(operation: str, differences: Sequence[Difference]) -> str:
    """Says what the program rounds or keeps otherwise than the operation."""
    parts = []
    for kind, verb, rest in (
        ("rounds", "computes", f"{operation} in float32"),
        ("keeps", "keeps", f"{operation} rounds to 16 bits"),
    ):
        if values := [each.value for each in differences if each.kind == kind]:
            values.sort(key=lambda value: value.equation.index if value.equation else -1)
            nouns = listed(list(dict.fromkeys(noun(behind(value)) for value in values)))
            parts.append(f"the program {verb} {nouns} in {values[0].dtype}, and {rest}")
    return "; ".join(parts)
