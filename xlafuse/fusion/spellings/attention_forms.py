"""The forms that attention has in a program: how its scores are masked, and its weights dropped.

A call may have biases, a mask, a soft cap and dropout, each written in several ways. `forms` reads those of a value
from the program, so that only their pattern is traced, and not one for each combination.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from xlafuse.fusion.graph import Value, before, behind
from xlafuse.fusion.layouts import element, number, peel
from xlafuse.fusion.spellings.rows import LOWEST
from xlafuse.fusion.terms import BY_ELEMENT

THROUGH = BY_ELEMENT | {"reduce_sum", "exp"}
"""Primitives between the products of attention."""
REACH = 80  # random bits of dropout are between
BIASES = {"bias": operator.pos, "another_bias": operator.pos, "penalty": operator.neg}
"""What is added to scores of each array that is added or subtracted."""
OPPOSITES = {"mask": "hiding", "mask2": "hiding2", "dropout_mask": "dropping"}
"""The names of masks, and of those that are True where the operation's is False."""
_ABSORBING = -1e30
"""A number as low is the sum of itself and any score, in bfloat16, too: half its last place is larger than scores."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a program computes attention.

    arrays: the names of those besides query, key and value: some of `BIASES`, sinks, and masks or their opposites.
    scores_in: "wide", "narrow" (the product alone), "narrow scores" (all but the softmax), or "all narrow".
    is_wide: whether the second product's result is cast to 16 bits. is_capped: whether the scores have a soft cap.
    hides: how hidden scores get their number: "choice" (`where(seen, scores, hidden)`), "sum" (`scores + where(seen, 0,
        hidden)`), "narrow sum" (where that choice is cast from 16 bits), or "" for not at all.
    is_causal: whether that hides later keys, and nothing else.
    sinks: what is subtracted from scores and sinks, one after the other: "joined" or "both" for the maximum of both, in
        one array or not, "scores" for that of scores alone; or "" for no sinks.
    drops: how weights are dropped: "choice" (`where(keep, weights / kept, 0)`), "product" (`weights * (keep / kept)`),
        or "" for not at all. divides_late: whether the result of that is divided by the kept share.
    drops_in: the name of the dtype of that, before or after the cast to 16 bits.
    """

    arrays: tuple[str, ...] = ()
    scores_in: str = "wide"
    is_wide: bool = False
    is_capped: bool = False
    hides: str = ""
    is_causal: bool = False
    sinks: str = ""
    drops: str = ""
    divides_late: bool = False
    drops_in: str = "float32"

    def plus(self, *arrays: str, **changes: str | bool) -> Form:
        """Returns a form with more arrays."""
        return replace(self, arrays=(*self.arrays, *arrays), **changes)


@functools.lru_cache(maxsize=4096)
def forms(weights: Value, *, is_wide: bool) -> tuple[Form, ...]:
    """Returns the forms that may have made weights, the most likely first. is_wide: see `Form`."""
    path = _path(weights)
    exponentials = [each for each in path if each.primitive == "exp"]
    # That of scores, beside which there may be one of sinks.
    exponential = max(exponentials, key=lambda each: math.prod(each.shape), default=None)
    if exponential is None or exponential.equation is None:
        return ()
    of_scores = frozenset(before(exponential.equation.inputs[0], BY_ELEMENT, REACH))
    scores = [each for each in path if each in of_scores]
    form = Form(is_wide=is_wide, is_capped=any(each.primitive == "tanh" for each in scores))
    is_joined = any(each.primitive == "concatenate" for each in scores)
    if is_joined or len(exponentials) > 1:
        maxima = filter(None, map(_subtracted_maximum, scores))
        subtracted = ("joined" if is_joined else "both" if each.primitive == "max" else "scores" for each in maxima)
        form = form.plus("sinks", sinks=" ".join(subtracted))
    return tuple(
        replace(masked, scores_in=scores_in)
        for dropped in _with_dropout(form, [each for each in path if each not in of_scores], frozenset(path))
        for masked in _with_masks(dropped, scores)
        for scores_in in _precisions(scores, exponential)
    )


def _path(weights: Value) -> list[Value]:
    """Returns the values from the product that makes the scores to the weights, in the program's order."""
    found = sorted((each for each in before(weights, THROUGH, REACH) if each.equation), key=_place)
    products = [each for each in found if each.primitive == "dot_general"]
    path = {each for each in products if _batches(each) == max(map(_batches, products))}
    for each in found:
        if each.equation is not None and not path.isdisjoint(each.equation.inputs):
            path.add(each)
    return [each for each in found if each in path]


def size_of_heads(weights: Value) -> int | None:
    """Returns the columns of a head of queries and keys, which the product that makes the scores contracts."""
    path = _path(weights)
    if not path or path[0].equation is None or path[0].primitive != "dot_general":
        return None
    product = path[0].equation
    return math.prod(product.inputs[0].shape[axis] for axis in product.params["dimension_numbers"][0][0])


def _place(value: Value) -> int:
    return -1 if value.equation is None else value.equation.index


def _batches(product: Value) -> int:
    """Returns the number of batch axes of a product."""
    return 0 if product.equation is None else len(product.equation.params["dimension_numbers"][1][0])


def _precisions(scores: list[Value], exponential: Value) -> tuple[str, ...]:
    if exponential.dtype.itemsize == 2:
        return ("all narrow",)
    return ("wide",) if scores[0].dtype.itemsize > 2 else ("narrow", "narrow scores")


def _with_masks(form: Form, scores: list[Value]) -> Iterator[Form]:
    """Yields the form with the biases and each mask that there may be among the steps from scores to their softmax."""
    choices, sums, added, subtracted = [], [], 0, 0
    for each in scores:
        assert each.equation is not None
        inputs = each.equation.inputs
        if (choice := _choice(each)) is not None:
            choices.append(("choice", choice))
        elif each.primitive in ("add", "sub") and not any(number(own) is not None for own in inputs):
            if _subtracted_maximum(each):
                continue
            if each.primitive == "sub":
                subtracted += 1
                continue
            added += 1
            for own in map(behind, inputs):
                if (choice := _choice(own)) is not None and choice.other == 0:
                    sums.append(("sum" if own.dtype == each.dtype else "narrow sum", choice))
    for how, choice in choices[:1] or (sums if len(sums) == 1 else []):
        masked = form.plus(*_biases(added - (how != "choice"), subtracted), hides=how)
        if len(choices) == 2 and choices[0][1].hidden == choices[1][1].hidden:
            names = (
                (OPPOSITES[name] if each.is_opposite else name)
                for name, (_, each) in zip(OPPOSITES, choices, strict=False)
            )
            yield masked.plus(*names)
            return
        is_constant = choice.mask.equation is not None and choice.mask.equation.is_constant
        if is_constant and (how == "choice" or choice.hidden <= LOWEST):
            yield replace(masked, is_causal=True)
        if how == "choice" or choice.hidden <= _ABSORBING:
            yield masked.plus(OPPOSITES["mask"] if choice.is_opposite else "mask")
    if not choices:
        yield form.plus(*_biases(added, subtracted))


def _biases(added: int, subtracted: int) -> tuple[str, ...]:
    return ("bias", "another_bias")[:added] + ("penalty",)[:subtracted]


def _subtracted_maximum(value: Value) -> Value | None:
    """Returns the maximum, of scores or of those and sinks, that a softmax subtracts; None for other values."""
    if value.equation is None or value.primitive != "sub":
        return None
    highest = peel(element(value.equation.inputs[1])).value
    return highest if highest.primitive in ("reduce_max", "max") else None


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """A choice between something and a number.

    hidden: the number, the lower one of two. is_opposite: whether that is where the mask is True. other: the other
    number, or None.
    """

    mask: Value
    hidden: float
    is_opposite: bool
    other: float | None


def _choice(value: Value) -> _Choice | None:
    if value.primitive != "select_n" or value.equation is None or len(value.equation.inputs) != 3:
        return None
    mask, *options = value.equation.inputs
    numbers = [None if (found := number(each)) is None else float(found) for each in options]
    hidden = min((each for each in numbers if each is not None), default=None)
    if hidden is None or number(mask) is not None:
        return None
    place = numbers.index(hidden)
    return _Choice(mask=mask, hidden=hidden, is_opposite=bool(place), other=numbers[1 - place])


def _with_dropout(form: Form, weights: list[Value], path: frozenset[Value]) -> list[Form]:
    """Returns the form with the dropout that there is among the steps from a softmax's exponentials to the weights."""
    for at, each in enumerate(weights):
        assert each.equation is not None
        choice = _choice(each)
        others = [own for own in each.equation.inputs if own not in path and number(own) is None]
        is_product = each.primitive == "mul" and any(map(_is_made_of_predicates, others))
        if not is_product and (choice is None or not others):
            continue
        is_late = any(own.primitive in ("mul", "div") for own in weights[at + 1 :])
        form = replace(form, drops="product", divides_late=is_late, drops_in=each.dtype.name)
        if choice is None:
            return [form.plus("dropout_mask"), form.plus(OPPOSITES["dropout_mask"])]
        return [form.plus(OPPOSITES["dropout_mask"] if choice.is_opposite else "dropout_mask", drops="choice")]
    return [form]


def _is_made_of_predicates(value: Value) -> bool:
    return any(each.dtype == np.bool_ for each in before(value, BY_ELEMENT, REACH))
