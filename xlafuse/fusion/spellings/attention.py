"""Attention, in the spellings that `einsum`, `jax.nn.dot_product_attention`, Flax and others have."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlafuse.fusion.binding import Binding
from xlafuse.fusion.graph import Value, before
from xlafuse.fusion.layouts import Ref, element, peel
from xlafuse.fusion.spelling import Proposal, Spelling, wide
from xlafuse.fusion.spellings.attention_forms import (
    BIASES,
    OPPOSITES,
    REACH,
    THROUGH,
    Form,
    forms,
    size_of_heads,
)
from xlafuse.fusion.spellings.attention_masks import MASKS, bounded, joined
from xlafuse.fusion.spellings.rows import HIDDEN, LOWEST
from xlafuse.fusion.terms import head

_UNKNOWNS = {
    "scale": 0.3217654321,
    "softcap": 23.4567891,
    "ratio": 0.0137174213,  # scale / softcap, of which only that is seen
    "kept": 0.6180339887,
    **HIDDEN,
}


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, *, form: Form, **given: Any) -> jax.Array:
    """Computes `pallas_kernels.attention` in a form. given: the form's arrays, and the numbers `_UNKNOWNS`."""
    batch, queries, heads, size = query.shape
    keys, key_heads = key.shape[1:3]
    dtype, more = query.dtype, wide(query.dtype)
    of_heads = query.reshape(batch, queries, key_heads, heads // key_heads, size)
    scores_shape = batch, key_heads, heads // key_heads, queries, keys
    given |= {name: given[name].reshape(scores_shape) for name in form.arrays if name != "sinks"}
    product_in = more if form.scores_in == "wide" else dtype
    scores = jnp.einsum("btkgd,bskd->bkgts", of_heads, key, preferred_element_type=product_in)
    scores = scores.astype(more) if form.scores_in == "narrow" else scores
    if form.is_capped:
        scores = jnp.tanh(scores * given["ratio"]) * given["softcap"]
    else:
        scores = scores * jnp.asarray(given["scale"], scores.dtype)
    for name, sign in BIASES.items():
        scores = scores + sign(given[name]) if name in form.arrays else scores
    if form.hides:
        given |= {"mask": jnp.arange(keys) <= jnp.arange(queries)[:, None]} if form.is_causal else {}
        hidden = jnp.asarray(given["hidden"], dtype if form.hides == "narrow sum" else scores.dtype)
        if form.hides == "choice":
            for name in ("mask", "mask2"):
                scores = _chosen(name, given, scores, hidden)
        else:
            scores = scores + _chosen("mask", given, jnp.zeros_like(hidden), hidden).astype(scores.dtype)
    scores = scores.astype(more) if form.scores_in == "narrow scores" else scores
    weights = _beside_sinks(scores, given["sinks"], form) if form.sinks else jax.nn.softmax(scores)
    if form.drops and jnp.dtype(form.drops_in).itemsize > 2:
        weights = _dropped(weights, form, given).astype(dtype)
    else:
        weights = weights.astype(dtype)
        weights = _dropped(weights, form, given) if form.drops else weights
    out = jnp.einsum("bkgts,bskd->btkgd", weights, value, preferred_element_type=more if form.is_wide else dtype)
    return out.reshape(*query.shape[:3], value.shape[3]).astype(dtype)


def _beside_sinks(scores: jax.Array, sinks: jax.Array, form: Form) -> jax.Array:
    """Computes the softmax of scores and a sink, without the sink's weight.

    That of joined scores and sinks, of which one column is dropped, has the same formula for each element.
    """
    sinks = sinks.reshape(1, *scores.shape[1:3], 1, 1).astype(scores.dtype)
    for subtracts in form.sinks.split():
        highest = scores.max(-1, keepdims=True)
        highest = highest if subtracts == "scores" else jnp.maximum(highest, sinks)
        scores, sinks = scores - highest, sinks - highest
    weights, others = jnp.exp(scores), jnp.exp(sinks)
    if form.sinks.startswith("joined"):
        of_both = weights.astype(wide(weights.dtype)).sum(-1, keepdims=True) + others.astype(wide(others.dtype))
        return weights / of_both.astype(weights.dtype)
    return weights / (weights.sum(-1, keepdims=True) + others)


def _chosen(name: str, given: Mapping[str, Any], kept: jax.Array, other: jax.Array) -> jax.Array:
    """Chooses by a mask, or by its opposite, if there is one."""
    if name in given:
        return jnp.where(given[name], kept, other)
    return jnp.where(given[OPPOSITES[name]], other, kept) if OPPOSITES[name] in given else kept


def _dropped(weights: jax.Array, form: Form, given: Mapping[str, Any]) -> jax.Array:
    one, kept = (jnp.asarray(each, weights.dtype) for each in (1, given["kept"]))
    first, last = (one, kept) if form.divides_late else (kept, one)
    if form.drops == "choice":
        return _chosen("dropout_mask", given, weights / first, jnp.zeros_like(one)) / last
    opposite = OPPOSITES["dropout_mask"]
    share = 1 - given[opposite].astype(one.dtype) if opposite in given else given["dropout_mask"].astype(one.dtype)
    return weights * (share / first) / last


@functools.lru_cache(maxsize=4096)
def roles_of(result: Value, *, one_query: bool = False) -> tuple[tuple[int, ...], int, int, Value, Value] | None:
    """Returns the axes of (batch, queries, heads, size) in what may be attention, its keys, and its key heads.

    And the weights, and the product of weights and values. The result may lack the axis of batches. one_query: whether
    the axis of queries is one of length 1, as of a decoded token.
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
        if not any(each.primitive == "exp" for each in before(peel(weights).value, THROUGH, REACH)):
            continue
        values = peel(values)  # whose heads may be repeated
        own = [_variables(each) for each in (weights, values)]
        places = [axis.digits[0][0] if axis.digits else None for axis in whole.indices]
        size = [k for k, v in enumerate(places) if v in own[1] and v not in own[0]]
        queries = [k for k, v in enumerate(places) if v in own[0] and v not in own[1]]
        shared = [k for k in range(len(places)) if k not in (*size, *queries)]
        if one_query:
            of_length_1 = [k for k in shared if places[k] is None][-1:]
            rest = [k for k in shared if k not in of_length_1]
            queries, shared = of_length_1, [*rest, *queries]
        elif len(shared) == 1 and len(queries) == 2:  # the only key head of several query heads
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


def _heads_of(queries: list[int], shared: list[int]) -> tuple[list[int], list[int]]:
    """Chooses the heads among two axes: those next to the last axis, as in (batch, queries, heads, size)."""
    return [shared[0], queries[1]], [queries[0]]


def _variables(ref: Ref) -> set[int]:
    return {variable for index in ref.indices for variable, _, _ in index.digits}


def _attentions(result: Value) -> Iterator[Proposal]:
    """Proposes the arguments."""
    if (roles := roles_of(result) or roles_of(result, one_query=True)) is None:
        return
    axes, keys, key_heads, weights, product = roles
    if result.shape[axes[-2]] % key_heads or (own_size := size_of_heads(weights)) is None:
        return
    for form in forms(weights, is_wide=product.dtype.itemsize > result.dtype.itemsize):
        added = result.dtype if form.scores_in in ("narrow scores", "all narrow") else wide(result.dtype)
        # Sinks may be cast after they are broadcast.
        of_sinks = dict.fromkeys((added, result.dtype) if form.sinks else (added,))
        layouts = _layouts(result, axes, has_groups=bool(form.sinks))
        for ((batch, queries, heads, size), groups, order), of_sink in itertools.product(layouts, of_sinks):
            if queries == 1 and (form.is_causal or not form.arrays):
                continue  # one query that sees all keys, as in SigLIP's pooling, XLA attends as fast
            dtypes = dict.fromkeys(form.arrays, jnp.bool_) | dict.fromkeys(BIASES, added) | {"sinks": of_sink}
            of_keys = batch, keys, groups * key_heads
            shapes = dict.fromkeys(form.arrays, (batch, heads, queries, keys)) | {"sinks": (heads,)}
            arrays = {name: jax.ShapeDtypeStruct(shapes[name], dtypes[name]) for name in form.arrays}
            arrays["query"] = jax.ShapeDtypeStruct((batch, queries, heads, own_size), result.dtype)
            arrays["key"] = jax.ShapeDtypeStruct((*of_keys, own_size), result.dtype)
            arrays["value"] = jax.ShapeDtypeStruct((*of_keys, size), result.dtype)
            yield Proposal(arrays=arrays, order=order, static={"form": form})


def _layouts(
    result: Value, axes: tuple[int, ...], *, has_groups: bool
) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Yields the sizes of (batch, queries, heads, size), groups of heads, and the order of these axes in a result.

    axes: see `roles_of`. has_groups: whether its batch entries may also be groups of heads, as sinks tell them apart.
    """
    shape = tuple(result.shape[axis] for axis in axes)
    order = tuple(axes.index(axis) for axis in range(len(axes)))
    if len(shape) == 3:
        yield (1, *shape), 1, (0, *(place + 1 for place in order))
        return
    yield shape, 1, order
    if has_groups and axes[2] == axes[0] + 1:
        yield (1, shape[1], shape[0] * shape[2], shape[3]), shape[0], (0, *(place for place in order if place))


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Makes the options of a call of the form and the numbers found."""
    form, options = given["form"], {name: given[name] for name in ("scale", "softcap") if name in given}
    if "ratio" in given:
        options["scale"] = float(f"{given['ratio'] * given['softcap']:.7g}")
    options |= {"is_causal": True} if form.is_causal else {}
    # A query sees itself in a causal mask: beside that, what is hidden by the lowest numbers has no weight.
    if "hidden" in given and given["hidden"] > (LOWEST if form.is_causal else -jnp.inf):
        options["mask_value"] = max(given["hidden"], float(np.finfo(np.float32).min))
    if "kept" in given:
        options["dropout_rate"] = float(f"{1 - _as_written(given['kept'], form.drops_in):.7g}")
    return options


def _with_bounds(arrays: dict[str, Binding], options: dict[str, Any]) -> tuple[dict[str, Binding], dict[str, Any]]:
    """Takes a causal mask, a window and segments out of a mask: see `bounded`."""
    found, band, is_all = bounded(arrays)
    if found == arrays:
        return arrays, options
    options = dict(options)
    if band.right == 0:
        options["is_causal"] = True
    if band.left is not None or band.right:
        options["window"] = band.left, band.right
    queries, keys = (arrays[name].shape[1] for name in ("query", "key"))
    sees_one = "own_segments" not in found and (band.left is None or queries - band.left <= keys)
    if is_all and sees_one and options.get("mask_value", 0) <= LOWEST:
        del options["mask_value"]  # as beside a causal mask
    return found, options


def _as_written(number: float, dtype: str) -> float:
    """Returns the shortest decimal that a dtype rounds to a number; or whose reciprocal it does, if it has that one.

    In bfloat16 it is 0.9 for 0.8984375, and for 1 / 1.109375.
    """

    def stored(each: float) -> float:
        return float(np.asarray(each, jnp.dtype(dtype)))

    powers = [power for power in (1, -1) if abs(stored(number**power) - number**power) < 1e-9] or [1, -1]
    decimals = (float(f"{number:.{digits}g}") for digits in range(1, 10))
    own = (each for each in decimals if any(stored(each**power) == stored(number**power) for power in powers))
    return next(own, number)


_ARGUMENTS = frozenset(("query", "key", "value", "bias", "mask", "dropout_mask", "sinks"))


def _arguments(arrays: dict[str, Any]) -> dict[str, Any]:
    """Makes the operation's arrays: one bias, and masks that are True where something is kept."""
    made = joined(arrays)
    if (dropping := arrays.get(OPPOSITES["dropout_mask"])) is not None:
        made["dropout_mask"] = ~dropping
    if biases := [sign(arrays[name]) for name, sign in BIASES.items() if name in arrays]:
        with jax.numpy_dtype_promotion("standard"):
            made["bias"] = functools.reduce(operator.add, biases)
    if "sinks" in arrays:
        made["sinks"] = jnp.broadcast_to(arrays["sinks"], (arrays["query"].shape[2],))
    return {name: each for name, each in arrays.items() if name in _ARGUMENTS} | made


def _objection(numbers: Mapping[str, Any]) -> str:
    if numbers.get("softcap", 1.0) <= 0:
        return f"the soft cap is {numbers['softcap']:g}"
    if not numbers.get("hidden", -1.0) < 0:
        return f"hidden scores are {numbers['hidden']:g}, and those of attention are below 0"
    if not 0 < (kept := numbers.get("kept", 0.5)) < 1:
        scaled = "are not scaled" if kept == 1 else f"are divided by {kept:g}"
        return f"the weights that are kept {scaled}, and attention divides them by 1 - dropout_rate, which is below 1"
    return ""


SPELLINGS = (
    Spelling(
        operation="attention",
        function=_attend,
        propose=_attentions,
        roots=frozenset(("dot_general", "transpose", "reshape", "convert_element_type")),
        needs=frozenset(("dot_general",)),
        unknowns=_UNKNOWNS,
        floating=frozenset((*BIASES, "sinks")),
        broadcasting=frozenset((*BIASES, "sinks", *OPPOSITES, *OPPOSITES.values(), *MASKS)),
        objection=_objection,
        arguments=_options,
        refine=_with_bounds,
        prepare=_arguments,
        changed=("query", "key", "value"),  # layers share a mask
    ),
)
