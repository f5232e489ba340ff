"""Attention, in the spellings that `einsum`, `jax.nn.dot_product_attention`, Flax and others have.

A call may have a bias, a mask, a soft cap and dropout, each in several forms. `_forms` reads those of a value from the
program, so that only their pattern is traced, and not one for each combination.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlafuse.fusion.graph import Value, before, behind
from xlafuse.fusion.layouts import Ref, element, number, peel
from xlafuse.fusion.spelling import Proposal, Spelling, wide
from xlafuse.fusion.spellings.rows import HIDDEN, LOWEST
from xlafuse.fusion.terms import BY_ELEMENT, head

_UNKNOWNS = {
    "scale": 0.3217654321,
    "softcap": 23.4567891,
    "ratio": 0.0137174213,  # scale / softcap, of which only that is seen
    "kept": 0.6180339887,
    **HIDDEN,
}
_THROUGH = BY_ELEMENT | {"reduce_sum", "exp"}
_REACH = 80  # random bits of dropout are between
_ABSORBING = -1e30
"""Added to a score in at least 8 bits, a number as low gives itself: no score is as large as half its last place."""


@dataclass(frozen=True, kw_only=True)
class _Form:
    """The form that attention has.

    scores_in: "wide", "narrow" (the product alone), "narrow scores" (all but the softmax), or "all narrow".
    is_wide: whether the second product's result is cast to 16 bits. is_capped: whether the scores have a soft cap.
    biases: how many arrays are added to the scores.
    hides: how hidden scores get their number: "choice" (`where(seen, scores, hidden)`), "sum" (`scores + where(seen, 0,
        hidden)`), "narrow sum" (where what is added is cast from 16 bits), or "" for not at all. is_causal: whether that hides later keys, and nothing else.
    drops: how weights are dropped: "choice" (`where(keep, weights / kept, 0)`), "product" (`weights * (keep / kept)`),
        or "" for not at all. drops_in: the name of the dtype, before or after the cast to 16 bits. divides_late: whether the result is
        divided by the kept share, and not what is chosen or multiplied.
    """

    scores_in: str = "wide"
    is_wide: bool = False
    is_capped: bool = False
    biases: int = 0
    hides: str = ""
    is_causal: bool = False
    drops: str = ""
    drops_in: str = "float32"
    divides_late: bool = False


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, *, over: str = "keys", **given: Any
) -> jax.Array:
    """Computes `pallas_kernels.attention` in a `_Form`, of the numbers `_UNKNOWNS`.

    given: both, and arrays: bias, another_bias; mask or its opposite `hiding`; dropout_mask or its opposite `dropping`.
    over: the axis of the softmax, "keys" or "queries".
    """
    form = _Form(**{name: given.pop(name) for name in asdict(_Form())})
    batch, queries, heads, size = query.shape
    keys, key_heads = key.shape[1:3]
    dtype, more = query.dtype, wide(query.dtype)
    grouped = (batch, key_heads, heads // key_heads, queries, keys)
    product_in = more if form.scores_in == "wide" else dtype
    queries_of = query.reshape(batch, queries, key_heads, heads // key_heads, size)
    scores = jnp.einsum("btkgd,bskd->bkgts", queries_of, key, preferred_element_type=product_in)
    scores = scores.astype(more) if form.scores_in == "narrow" else scores
    if form.is_capped:
        scores = jnp.tanh(scores * given["ratio"]) * given["softcap"]
    else:
        scores = scores * jnp.asarray(given["scale"], scores.dtype)
    for name in _BIASES[: form.biases]:
        scores = scores + given[name].reshape(grouped)
    if form.hides:
        seen = jnp.arange(keys) <= jnp.arange(queries)[:, None]
        hidden = jnp.asarray(given["hidden"], dtype if form.hides == "narrow sum" else scores.dtype)
        masks = (seen, None) if form.is_causal else _reshaped(given, ("mask", "hiding"), grouped)
        shown = scores if form.hides == "choice" else jnp.zeros_like(hidden)
        shown = _chosen(shown, hidden, *masks)
        scores = shown if form.hides == "choice" else scores + shown.astype(scores.dtype)
    scores = scores.astype(more) if form.scores_in == "narrow scores" else scores
    weights = jax.nn.softmax(scores, axis=-2 if over == "queries" else -1)
    weights = weights if form.drops and jnp.dtype(form.drops_in).itemsize > 2 else weights.astype(dtype)
    if form.drops:
        masks = _reshaped(given, ("dropout_mask", "dropping"), grouped)
        kept, late = jnp.ones((), weights.dtype), jnp.asarray(given["kept"], weights.dtype)
        kept, late = (kept, late) if form.divides_late else (late, kept)
        weights = {"choice": _chosen_weights, "product": _multiplied}[form.drops](weights, kept, *masks)
        weights = (weights / late).astype(dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, value, preferred_element_type=more if form.is_wide else dtype)
    return out.reshape(query.shape).astype(dtype)


_BIASES = ("bias", "another_bias")


def _reshaped(given: Mapping[str, Any], names: tuple[str, str], shape: tuple[int, ...]) -> list[jax.Array | None]:
    """Returns two arrays in a shape; None for one that is not given."""
    return [given[name].reshape(shape) if name in given else None for name in names]


def _chosen(scores: jax.Array, hidden: jax.Array, seen: jax.Array | None, hiding: jax.Array | None) -> jax.Array:
    return jnp.where(seen, scores, hidden) if hiding is None else jnp.where(hiding, hidden, scores)


def _chosen_weights(
    weights: jax.Array, kept: jax.Array, keep: jax.Array | None, dropping: jax.Array | None
) -> jax.Array:
    return _chosen(weights / kept, jnp.zeros((), weights.dtype), keep, dropping)


def _multiplied(
    weights: jax.Array, kept: jax.Array, keep: jax.Array | None, dropping: jax.Array | None
) -> jax.Array:
    share = keep.astype(weights.dtype) if dropping is None else 1 - dropping.astype(weights.dtype)
    return weights * (share / kept)


@functools.lru_cache(maxsize=4096)
def _roles(result: Value, *, is_softmax: bool = True) -> tuple[tuple[int, ...], int, int, Value, Value] | None:
    """Returns the axes of (batch, queries, heads, size) in what may be attention, its keys, and its key heads.

    Further the weights, and the product of them and the values. The result may lack the axis of batches. is_softmax: whether the weights are exponentials, or other numbers made of
    a product.
    """
    if not jnp.issubdtype(result.dtype, jnp.floating) or len(result.shape) not in (3, 4):
        return None
    whole = element(result)
    ref = peel(whole)
    if ref.value.primitive == "convert_element_type" and ref.value.equation is not None:
        ref = peel(Ref(ref.value.equation.inputs[0], ref.indices))
    if ref.value.primitive != "dot_general":
        return None
    product = head(ref)
    if product is None or not product.bound[0].digits:
        return None
    for weights, values in itertools.permutations([part for part, _ in product.parts]):
        made_of = list(before(peel(weights).value, _THROUGH, _REACH))
        if any(each.primitive == "exp" for each in made_of) != is_softmax:
            continue
        if not is_softmax and not any(map(_is_of_heads, made_of)):
            continue
        values = peel(values)  # whose heads may be repeated
        own = [_variables(each) for each in (weights, values)]
        places = [axis.digits[0][0] if axis.digits else None for axis in whole.indices]
        size = [k for k, v in enumerate(places) if v in own[1] and v not in own[0]]
        queries = [k for k, v in enumerate(places) if v in own[0] and v not in own[1]]
        shared = [k for k in range(len(places)) if k not in (*size, *queries)]
        if len(shared) == 1 and len(queries) == 2:  # the only key head of several query heads
            shared, queries = _heads_of(queries, shared)
        if (len(size), len(queries), len(shared)) != (1, 1, len(places) - 2):
            continue
        heads = shared[-1]
        axes = (*shared[:-1], queries[0], heads, size[0])
        variable = places[heads]
        digits = [d for index in values.indices for d in index.digits if d[0] == variable]
        key_heads = 1
        for _, _, count in digits:
            key_heads *= count
        return axes, product.bound[0].size, key_heads, peel(weights).value, ref.value
    return None


def _is_of_heads(value: Value) -> bool:
    """Returns whether a value is a product for each head of each sequence, as scores are."""
    if value.equation is None or value.primitive != "dot_general":
        return False
    return len(value.equation.params["dimension_numbers"][1][0]) == 2


def _heads_of(queries: list[int], shared: list[int]) -> tuple[list[int], list[int]]:
    """Chooses the heads among two axes: those next to the last axis, as in (batch, queries, heads, size)."""
    return [shared[0], queries[1]], [queries[0]]


def _variables(ref: Ref) -> set[int]:
    return {variable for index in ref.indices for variable, _, _ in index.digits}


@functools.lru_cache(maxsize=4096)
def _forms(result: Value) -> tuple[tuple[_Form, frozenset[str]], ...]:
    """Returns the forms that attention may have before a value, and the arrays that each has besides."""
    roles = _roles(result)
    assert roles is not None
    weights, product = roles[3], roles[4]
    path = _path(weights)
    exponential = next((each for each in path if each.primitive == "exp"), None)
    if exponential is None or exponential.equation is None:
        return ()
    of_scores = frozenset(before(exponential.equation.inputs[0], BY_ELEMENT, _REACH))
    scores = [each for each in path if each in of_scores]
    form = _Form(
        is_wide=product.dtype.itemsize > result.dtype.itemsize,
        is_capped=any(each.primitive == "tanh" for each in scores),
    )
    dropped = _with_dropout(form, [each for each in path if each not in of_scores], frozenset(path))
    return tuple(
        (replace(hiding, scores_in=scores_in), arrays | more)
        for form, arrays in dropped
        for hiding, more in _with_masks(form, scores)
        for scores_in in _precisions(scores, exponential)
    )


def _path(weights: Value) -> list[Value]:
    """Returns the values from the product that makes the scores to the weights, in the program's order."""
    found = sorted((each for each in before(weights, _THROUGH, _REACH) if each.equation), key=_place)
    products = [each for each in found if each.primitive == "dot_general"]
    path = {each for each in products if _batches(each) == max(map(_batches, products))}
    for each in found:
        if each.equation is not None and not path.isdisjoint(each.equation.inputs):
            path.add(each)
    return [each for each in found if each in path]


def _place(value: Value) -> int:
    return -1 if value.equation is None else value.equation.index


def _batches(product: Value) -> int:
    """Returns the number of batch axes of a product."""
    return 0 if product.equation is None else len(product.equation.params["dimension_numbers"][1][0])


def _precisions(scores: list[Value], exponential: Value) -> tuple[str, ...]:
    if exponential.dtype.itemsize == 2:
        return ("all narrow",)
    return ("wide",) if scores[0].dtype.itemsize > 2 else ("narrow", "narrow scores")


def _with_masks(form: _Form, scores: list[Value]) -> Iterator[tuple[_Form, frozenset[str]]]:
    """Yields the form with each mask that there may be among the steps from scores to their softmax, and its biases."""
    choices, sums, biases = [], [], 0
    for each in scores:
        assert each.equation is not None
        inputs = each.equation.inputs
        if each.primitive == "select_n" and (choice := _choice(each)) is not None:
            choices.append(("choice", *choice))
        elif each.primitive in ("add", "sub") and not any(number(own) is not None for own in inputs):
            if peel(element(inputs[1])).value.primitive == "reduce_max":
                continue
            biases += 1
            for own in map(behind, inputs):
                if (choice := _choice(own)) is not None and choice[3] == 0:
                    sums.append(("sum" if own.dtype == each.dtype else "narrow sum", *choice))
    hiding = choices[:1] or (sums if len(sums) == 1 else [])
    for how, mask, is_opposite, hidden, _ in hiding:
        own = replace(form, hides=how, biases=biases - (how != "choice"))
        if mask.equation is not None and mask.equation.is_constant and (how == "choice" or hidden <= LOWEST):
            yield replace(own, is_causal=True), frozenset(_BIASES[: own.biases])
        if how == "choice" or hidden <= _ABSORBING:
            name = "hiding" if is_opposite else "mask"
            yield own, frozenset((*_BIASES[: own.biases], name))
    if not choices:
        yield replace(form, biases=biases), frozenset(_BIASES[:biases])


def _choice(value: Value) -> tuple[Value, bool, float, float | None] | None:
    """Returns the mask by which a value is some number, whether where it is True, that number, and the other one.

    Of two numbers, the first is the lower one. None where the value is no such choice.
    """
    if value.primitive != "select_n" or value.equation is None or len(value.equation.inputs) != 3:
        return None
    mask, *options = value.equation.inputs
    numbers = [number(each) for each in options]
    if number(mask) is not None or numbers == [None, None]:
        return None
    place = int(numbers[0] is None or (numbers[1] is not None and numbers[1] < numbers[0]))
    other = numbers[1 - place]
    return mask, bool(place), float(numbers[place]), None if other is None else float(other)


def _with_dropout(form: _Form, weights: list[Value], path: frozenset[Value]) -> list[tuple[_Form, frozenset[str]]]:
    """Returns the form with the dropout that there is among the steps from a softmax's exponentials to the weights."""
    for at, each in enumerate(weights):
        assert each.equation is not None
        choice = _choice(each)
        if each.primitive != "mul" and choice is None:
            continue
        if all(own in path or number(own) is not None for own in each.equation.inputs):
            continue
        is_late = any(own.primitive in ("mul", "div") for own in weights[at + 1 :])
        form = replace(form, drops_in=each.dtype.name, divides_late=is_late)
        keep, dropping = frozenset(("dropout_mask",)), frozenset(("dropping",))
        if choice is not None:
            return [(replace(form, drops="choice"), dropping if choice[1] else keep)]
        return [(replace(form, drops="product"), names) for names in (keep, dropping)]
    return [(form, frozenset())]


def _attentions(result: Value) -> Iterator[Proposal]:
    """Proposes the arguments."""
    if (roles := _roles(result)) is None:
        return
    axes, keys, key_heads = roles[:3]
    shape = [result.shape[axis] for axis in axes]
    batch, queries, heads, size = shape if len(shape) == 4 else (1, *shape)
    order = tuple(axes.index(axis) for axis in range(len(axes)))
    if len(shape) == 3:
        order = (0, *(place + 1 for place in order))
    if heads % key_heads:
        return
    given = jax.ShapeDtypeStruct((batch, keys, key_heads, size), result.dtype)
    own = {"query": jax.ShapeDtypeStruct((batch, queries, heads, size), result.dtype), "key": given, "value": given}
    for form, names in _forms(result):
        if form.is_causal and queries == 1:
            continue
        added = result.dtype if form.scores_in in ("narrow scores", "all narrow") else wide(result.dtype)
        further = {name: added if name in _BIASES else jnp.bool_ for name in sorted(names)}
        scores = {name: jax.ShapeDtypeStruct((batch, heads, queries, keys), dtype) for name, dtype in further.items()}
        yield Proposal(arrays={**own, **scores}, order=order, static=asdict(form))


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Makes the options of a call of the form and the numbers found."""
    options = {name: given[name] for name in ("scale", "softcap") if name in given}
    if "ratio" in given:
        options["scale"] = float(f"{given['ratio'] * given['softcap']:.7g}")
    options |= {"is_causal": True} if given["is_causal"] else {}
    if "hidden" in given and given["hidden"] > (LOWEST if given["is_causal"] else -jnp.inf):
        options["mask_value"] = max(given["hidden"], float(np.finfo(np.float32).min))
    if "kept" in given:
        options["dropout_rate"] = float(f"{1 - _as_written(given['kept'], given['drops_in']):.7g}")
    return options


def _as_written(number: float, dtype: str) -> float:
    """Returns the shortest number that a dtype rounds to the same: 0.9 for 0.8984375 in bfloat16."""
    shortest = (float(f"{number:.{digits}g}") for digits in range(1, 10))
    rounded = np.asarray(number, jnp.dtype(dtype))
    return next((each for each in shortest if np.asarray(each, jnp.dtype(dtype)) == rounded), number)


def _arguments(arrays: dict[str, Any]) -> dict[str, Any]:
    """Makes the operation's arrays: one bias, and masks that are True where something is kept."""
    for name, opposite in (("mask", "hiding"), ("dropout_mask", "dropping")):
        if opposite in arrays:
            arrays = {**arrays, name: ~arrays[opposite]}
    if "another_bias" in arrays:
        arrays = {**arrays, "bias": arrays["bias"] + arrays["another_bias"]}
    return {name: each for name, each in arrays.items() if name not in ("hiding", "dropping", "another_bias")}


def _objection(numbers: Mapping[str, Any]) -> str:
    if numbers.get("softcap", 1.0) <= 0:
        return f"the soft cap is {numbers['softcap']:g}"
    if not numbers.get("hidden", -1.0) < 0:
        return f"hidden scores are {numbers['hidden']:g}, and those of attention are below 0"
    if not 0 < (kept := numbers.get("kept", 0.5)) < 1:
        scaled = "are not scaled" if kept == 1 else f"are divided by {kept:g}"
        return f"the weights that are kept {scaled}, and attention divides them by 1 - dropout_rate, which is below 1"
    return ""


def _spellings() -> Iterator[Spelling]:
    common: dict[str, Any] = {
        "operation": "attention",
        "propose": _attentions,
        "needs": frozenset(("dot_general",)),
        "unknowns": _UNKNOWNS,
        "broadcasting": frozenset((*_BIASES, "mask", "hiding", "dropout_mask", "dropping")),
        "floating": frozenset(_BIASES),
        "objection": _objection,
    }
    yield Spelling(
        function=_attend,
        roots=frozenset(("dot_general", "transpose", "reshape", "convert_element_type")),
        arguments=_options,
        prepare=_arguments,
        **common,
    )
    yield Spelling(
        function=functools.partial(_attend, over="queries"),
        roots=frozenset(("dot_general",)),
        difference="its softmax runs over the queries, and that of attention over the keys",
        **common,
    )


def _mixed(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Computes attention's second product."""
    batch, heads, queries, keys = weights.shape
    grouped = weights.reshape(batch, value.shape[2], heads // value.shape[2], queries, keys)
    mixed = jnp.einsum("bkgts,bskd->btkgd", grouped, value)
    return mixed.reshape(batch, queries, heads, value.shape[-1])


def _weighted(result: Value) -> Iterator[Proposal]:
    """Proposes weights that are no softmax, and values, for the heads of several sequences."""
    roles = _roles(result, is_softmax=False)
    if roles is not None and len(result.shape) == 4:
        axes, keys, key_heads, *_ = roles
        batch, queries, heads, size = (result.shape[axis] for axis in axes)
        weights = jax.ShapeDtypeStruct((batch, heads, queries, keys), result.dtype)
        value = jax.ShapeDtypeStruct((batch, keys, key_heads, size), result.dtype)
        order = tuple(axes.index(axis) for axis in range(4))
        yield Proposal(arrays={"weights": weights, "value": value}, order=order)


_NO_SOFTMAX = Spelling(
    operation="attention",
    function=_mixed,
    propose=_weighted,
    roots=frozenset(("dot_general",)),
    needs=frozenset(("dot_general",)),
    difference="its weights are no softmax of the scores, and those of attention are",
)

SPELLINGS: tuple[Spelling, ...] = (*_spellings(), _NO_SOFTMAX)
