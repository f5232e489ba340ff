"""Cross-entropy of logits and integer labels, also with the product that makes the logits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.fusion.graph import LAYOUTS, Value, before
from xlafuse.fusion.spelling import Proposal, Spelling
from xlafuse.fusion.terms import ELEMENTWISE

_NO_LABEL = -(2**31)
_BACK = ELEMENTWISE | LAYOUTS | {"add", "sub", "mul", "reduce_sum", "gather"}
_REACH = 40


@functools.lru_cache(maxsize=4096)
def _logits(value: Value) -> Value | None:
    """Returns the array of the rows whose maximum is taken before a value."""
    maxima = (each.equation for each in before(value, _BACK, _REACH) if each.primitive == "reduce_max")
    first = next(maxima, None)
    return None if first is None or len(first.params["axes"]) != 1 else first.inputs[0]


def _losses(value: Value, *, is_total: bool = False) -> Iterator[Proposal]:
    """Proposes logits and labels. is_total: whether the value is the sum of all losses."""
    if not jnp.issubdtype(value.dtype, jnp.floating) or (is_total and value.shape):
        return
    rows = _logits(value)
    if rows is None or not jnp.issubdtype(rows.dtype, jnp.floating) or rows.shape[-1] < 2:
        return
    shape = value.shape[:-1] if value.primitive == "gather" and value.shape[-1:] == (1,) else value.shape
    shape = rows.shape[:-1] if is_total else shape
    arrays = {
        "logits": jax.ShapeDtypeStruct((*shape, _vocabulary(rows)), rows.dtype),
        "labels": jax.ShapeDtypeStruct(shape, jnp.int32),
    }
    order = () if is_total else tuple(range(len(shape)))
    yield Proposal(arrays=arrays, order=order, static={"result_in": value.dtype})


def _soft_losses(value: Value) -> Iterator[Proposal]:
    """Proposes labels that are a number for each class."""
    for each in _losses(value):
        logits = each.arrays["logits"]
        labels = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
        yield Proposal(arrays={"logits": logits, "labels": labels}, order=each.order, static=each.static)


def _soft(logits: jax.Array, labels: jax.Array, *, result_in: Any) -> jax.Array:
    return -jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1)


def _vocabulary(rows: Value) -> int:
    """Returns the size of the axis whose maximum is taken."""
    (axis,) = next(user.params["axes"] for user in rows.users if user.primitive == "reduce_max")
    return rows.shape[axis]


def _at(rows: jax.Array, labels: jax.Array) -> jax.Array:
    """Takes the logits of labels, as `take_along_axis` does for labels from 0 on."""
    last = rows.ndim - 1
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(last,),
        start_index_map=(last,),
        operand_batching_dims=tuple(range(last)),
        start_indices_batching_dims=tuple(range(last)),
    )
    found = jax.lax.gather(rows, labels[..., None, None], numbers, (1,) * rows.ndim, mode="fill", fill_value=jnp.nan)
    return found.reshape(labels.shape)


def _of_optax(logits: jax.Array, labels: jax.Array, *, result_in: Any) -> jax.Array:
    return jax.nn.logsumexp(logits, axis=-1) - _at(logits, labels)


def _by_hand(logits: jax.Array, labels: jax.Array, *, result_in: Any) -> jax.Array:
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.log(jnp.sum(jnp.exp(logits - maximum), axis=-1)) + maximum[..., 0] - _at(logits, labels)


def _log_likelihood(logits: jax.Array, labels: jax.Array, *, result_in: Any) -> jax.Array:
    return _at(jax.nn.log_softmax(logits, axis=-1), labels)


def _negative(logits: jax.Array, labels: jax.Array, *, result_in: Any) -> jax.Array:
    return -_at(jax.nn.log_softmax(logits, axis=-1), labels)


def _likelihood_by_one_hot(logits: jax.Array, labels: jax.Array, *, result_in: Any, axis: Any = -1) -> jax.Array:
    one_hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=result_in)
    return jnp.sum(one_hot * jax.nn.log_softmax(logits), axis=axis)


def _one_hot(logits: jax.Array, labels: jax.Array, *, result_in: Any, axis: Any = -1) -> jax.Array:
    return -_likelihood_by_one_hot(logits, labels, result_in=result_in, axis=axis)


def _options(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {name: each for name, each in given.items() if name != "result_in"} | more


def _others_ignored(arrays: dict[str, Any]) -> dict[str, Any]:
    """Ignores labels that name no token: their one-hot rows are zero, and so is the loss."""
    labels, vocabulary = arrays["labels"], arrays["logits"].shape[-1]
    return {**arrays, "labels": jnp.where((labels >= 0) & (labels < vocabulary), labels, -1)}


def _spellings() -> Iterator[Spelling]:
    common: dict[str, Any] = {"operation": "cross_entropy", "propose": _losses, "floating": frozenset(("logits",))}
    strict = {**common, "arguments": functools.partial(_options, ignore_index=_NO_LABEL)}
    ends = frozenset(("sub", "add", "neg"))
    for function in (_of_optax, _by_hand, _negative):
        yield Spelling(function=function, roots=ends, **strict)
    yield Spelling(function=_log_likelihood, roots=frozenset(("gather",)), negated=True, **strict)
    for function, root in ((_one_hot, "neg"), (_likelihood_by_one_hot, "reduce_sum")):
        one_hot = {**common, "roots": frozenset((root,)), "prepare": _others_ignored, "negated": root != "neg"}
        yield Spelling(function=function, arguments=functools.partial(_options, ignore_index=-1), **one_hot)
        total = {**one_hot, "propose": functools.partial(_losses, is_total=True)}
        sums = functools.partial(_options, ignore_index=-1, reduction="sum")
        yield Spelling(function=functools.partial(function, axis=None), arguments=sums, **total)
    yield Spelling(
        function=_soft,
        roots=frozenset(("neg",)),
        difference="its labels are a probability for each class, and cross_entropy takes the number of one class",
        **{**common, "propose": _soft_losses},
    )


SPELLINGS: tuple[Spelling, ...] = tuple(_spellings())
