"""Attention, in the spellings that `einsum`, `jax.nn.dot_product_attention` and Flax have."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.fusion.graph import Value, before
from xlafuse.fusion.layouts import Ref, element, peel
from xlafuse.fusion.spelling import Proposal, Spelling, wide
from xlafuse.fusion.spellings.rows import HIDDEN, hidden_objection
from xlafuse.fusion.terms import BY_ELEMENT, head

_UNKNOWN = {"scale": 0.3217654321}
_THROUGH = BY_ELEMENT | {"reduce_sum", "exp"}
_REACH = 80  # random bits of dropout are between
_CAPPED = {"softcap": 23.4567891, "ratio": 0.0137174213}  # ratio: scale / softcap, of which only that is seen


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    scale: float = 1.0,
    ratio: float = 1.0,
    hidden: float = -jnp.inf,
    softcap: float | None = None,
    is_causal: bool = False,
    scores_in: str = "wide",
    result_in: str = "narrow",
    over: str = "keys",
) -> jax.Array:
    """Computes `pallas_kernels.attention`.

    over: the axis of the softmax, "keys" or "queries".
    scores_in: "wide", "narrow" (the product alone), "narrow scores" (all but the softmax), or
        "all narrow".
    """
    batch, queries, heads, size = query.shape
    keys, key_heads = key.shape[1:3]
    dtype, more = query.dtype, wide(query.dtype)
    grouped = query.reshape(batch, queries, key_heads, heads // key_heads, size)
    product_in = more if scores_in == "wide" else dtype
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=product_in)
    scores = scores.astype(more) if scores_in == "narrow" else scores
    scores = scores * jnp.asarray(scale, scores.dtype) if softcap is None else jnp.tanh(scores * ratio) * softcap
    if bias is not None:
        scores = scores + bias.reshape(batch, key_heads, heads // key_heads, queries, keys)
    if is_causal:
        seen = jnp.arange(keys) <= jnp.arange(queries)[:, None]
        scores = jnp.where(seen, scores, jnp.asarray(hidden, scores.dtype))
    if mask is not None:
        mask = mask.reshape(batch, key_heads, heads // key_heads, queries, keys)
        scores = jnp.where(mask, scores, jnp.asarray(hidden, scores.dtype))
    scores = scores.astype(more) if scores_in == "narrow scores" else scores
    weights = jax.nn.softmax(scores, axis=-2 if over == "queries" else -1).astype(dtype)
    result_type = more if result_in == "wide" else dtype
    out = jnp.einsum("bkgts,bskd->btkgd", weights, value, preferred_element_type=result_type)
    return out.reshape(query.shape).astype(dtype)


@functools.lru_cache(maxsize=4096)
def _roles(result: Value, *, is_softmax: bool = True) -> tuple[tuple[int, ...], int, int] | None:
    """Returns the axes of (batch, queries, heads, size) in what may be attention, its keys, and its key heads.

    The result may lack the axis of batches. is_softmax: whether the weights are exponentials, or other numbers made of
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
        return axes, product.bound[0].size, key_heads
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


def _attentions(result: Value, *, more: Mapping[str, Callable[[Any], Any]], **static: Any):
    """Proposes the arguments. more: for a mask or a bias, its dtype as a function of the result's."""
    if (roles := _roles(result)) is None:
        return
    axes, keys, key_heads = roles
    shape = [result.shape[axis] for axis in axes]
    batch, queries, heads, size = shape if len(shape) == 4 else (1, *shape)
    order = tuple(axes.index(axis) for axis in range(len(axes)))
    if len(shape) == 3:
        order = (0, *(place + 1 for place in order))
    if heads % key_heads or (static.get("is_causal") and queries == 1):
        return
    given = jax.ShapeDtypeStruct((batch, keys, key_heads, size), result.dtype)
    arrays = {"query": jax.ShapeDtypeStruct((batch, queries, heads, size), result.dtype), "key": given, "value": given}
    scores = (batch, heads, queries, keys)
    arrays |= {name: jax.ShapeDtypeStruct(scores, dtype(result.dtype)) for name, dtype in more.items()}
    yield Proposal(arrays=arrays, order=order, static=static)


def _options(given: dict[str, Any]) -> dict[str, Any]:
    options = {name: each for name, each in given.items() if name not in ("hidden", "ratio")}
    if "ratio" in given:
        options["scale"] = float(f"{given['ratio'] * given['softcap']:.7g}")
    return options


def _objection(numbers: Mapping[str, float]) -> str:
    return hidden_objection(numbers) if numbers.get("softcap", 1.0) > 0 else f"the soft cap is {numbers['softcap']:g}"


_EMPTY = "a query whose mask hides every key has the mean of all values in the program, and zeros in attention"


def _spellings() -> Iterator[Spelling]:
    ways = (
        ("wide", "narrow"),
        ("narrow", "narrow"),
        ("narrow scores", "narrow"),
        ("all narrow", "narrow"),
        ("wide", "wide"),
    )
    for (scores_in, result_in), capped, hiding, biased in itertools.product(
        ways, (True, False), ("causal", "mask", ""), (True, False)
    ):
        unknowns = {**(_CAPPED if capped else _UNKNOWN), **(HIDDEN if hiding else {})}
        more: dict[str, Callable[[Any], Any]] = {"mask": lambda dtype: jnp.bool_} if hiding == "mask" else {}
        if biased:
            more["bias"] = jnp.dtype if scores_in in ("narrow scores", "all narrow") else wide
        static = {"is_causal": True} if hiding == "causal" else {}
        yield Spelling(
            operation="attention",
            function=functools.partial(_attend, scores_in=scores_in, result_in=result_in),
            propose=functools.partial(_attentions, more=more, **static),
            roots=frozenset(("dot_general", "transpose", "reshape", "convert_element_type")),
            needs=frozenset(("dot_general",)),
            unknowns=unknowns,
            broadcasting=frozenset(("mask", "bias")),
            floating=frozenset(("bias",)),
            objection=_objection,
            arguments=_options,
            allowed_by="empty_rows" if hiding == "mask" else None,
            difference=_EMPTY if hiding == "mask" else "",
        )


def _over_queries() -> Iterator[Spelling]:
    """Yields attention whose softmax runs over the queries, which is refused."""
    for scores_in, is_masked in itertools.product(("wide", "narrow", "narrow scores", "all narrow"), (True, False)):
        more: dict[str, Callable[[Any], Any]] = {"mask": lambda dtype: jnp.bool_} if is_masked else {}
        yield Spelling(
            operation="attention",
            function=functools.partial(_attend, scores_in=scores_in, over="queries"),
            propose=functools.partial(_attentions, more=more),
            roots=frozenset(("dot_general",)),
            needs=frozenset(("dot_general",)),
            unknowns={**_UNKNOWN, **(HIDDEN if is_masked else {})},
            broadcasting=frozenset(("mask",)),
            difference="its softmax runs over the queries, and that of attention over the keys",
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
        axes, keys, key_heads = roles
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

SPELLINGS: tuple[Spelling, ...] = (*_spellings(), *_over_queries(), _NO_SOFTMAX)
