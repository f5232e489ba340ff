"""Says why a part of a program is not an operation, in its author's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xlafuse.fusion.dropout import is_random
from xlafuse.fusion.graph import LAYOUTS, Equation, Value, is_free
from xlafuse.fusion.layouts import number
from xlafuse.fusion.match import Difference, Match, other_number
from xlafuse.fusion.site import Refusal
from xlafuse.fusion.words import listed, noun

OPERATIONS = {"rotation": "rope", "dequantized": "quantized_linear"}
"""The operations that reports name for parts that are none themselves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Miss:
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
        return Refusal(operation=self.operation, value=place, reason=self.reason(), covered=self.covered)

    def reason(self) -> str:
        """Says what the operation does not do as the program does."""
        operation = OPERATIONS.get(self.operation, self.operation)
        options = [f"a {name}" for name in ("bias", "mask", "residual") if name in self.match.arrays]
        with_options = f"{operation} with {listed(options)}" if options else operation
        found = sorted(self.match.differences, key=lambda each: _index(each.value))
        steps = [each for each in found if each.kind == "step"]
        parts = []
        if any(map(_drops, steps)):
            parts.append(f"the program drops elements at random (dropout) inside it, which {operation} does not")
            steps = [each for each in steps if not _drops(each) and not _is_of_number(each)]
        else:
            parts += [_other_number(each, operation) for each in found if each.kind == "number"]
        parts += [f"the program also {_step(each)}, which {with_options} does not" for each in steps]
        for kind, dtype in (("rounds", "float32"), ("keeps", "16 bits")):
            if values := [_computed(each.value) for each in found if each.kind == kind]:
                nouns = listed(list(dict.fromkeys(map(noun, values))))
                own = next(each.value.dtype for each in found if each.kind == kind)
                verb, rest = (
                    ("computes", f"{operation} in") if kind == "rounds" else ("keeps", f"{operation} rounds to")
                )
                parts.append(f"the program {verb} {nouns} in {own}, and {rest} {dtype}")
        return "; ".join(dict.fromkeys(parts)) + ("; allow={'rounding'} takes it" if self.is_allowed else "")


def apart(misses: Sequence[Miss]) -> list[Miss]:
    """Chooses misses that do not overlap, those with the fewest differences first."""
    chosen: list[Miss] = []
    taken: set[Equation] = set()
    for miss in sorted(misses, key=lambda miss: miss.cost):
        own = {equation for equation in miss.covered if not is_free(equation)}
        if not own & taken:
            chosen.append(miss)
            taken |= own
    return chosen


def _index(value: Value) -> int:
    return -1 if value.equation is None else value.equation.index


def _other_number(difference: Difference, operation: str) -> str:
    kind = "product" if difference.place else "sum"
    return other_number(kind, difference.found, difference.wanted, operation)


def _computed(value: Value) -> Value:
    """Returns the value that is cast, or put in another layout."""
    while value.primitive in LAYOUTS and value.equation is not None and value.equation.inputs[0].equation is not None:
        value = value.equation.inputs[0]
    return value


def _step(difference: Difference) -> str:
    """Names a step of the program with the other operand."""
    value, place = difference.value, difference.place
    assert value.equation is not None
    others = [each for k, each in enumerate(value.equation.inputs) if k != place]
    if len(others) != 1 or (verb := _VERBS.get(value.primitive)) is None:
        return f"applies {noun(value)}" + (" (a mask, or a choice)" if value.primitive == "select_n" else "")
    constant = number(others[0])
    if constant is not None:
        return f"{verb} {float(constant):g}"
    array = _computed(others[0])
    return f"{verb} an array ({array.dtype}{list(array.shape)})"


_VERBS = {
    "add": "adds", "sub": "subtracts", "mul": "multiplies by", "div": "divides by",
    "max": "takes the maximum with", "min": "takes the minimum with",
}  # fmt: skip


def _is_of_number(difference: Difference) -> bool:
    """Returns whether a step takes a number beside the value, as the division by the share that dropout keeps does."""
    equation = difference.value.equation
    others = [] if equation is None else [each for k, each in enumerate(equation.inputs) if k != difference.place]
    return len(others) == 1 and number(others[0]) is not None


def _drops(difference: Difference) -> bool:
    """Returns whether a step sets elements to zero at random."""
    value = difference.value
    if value.equation is None or value.primitive not in ("mul", "select_n"):
        return False
    return any(is_random(each) for k, each in enumerate(value.equation.inputs) if k != difference.place)
