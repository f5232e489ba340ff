"""Cross-entropy of logits and integer labels, also with the product that makes the logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.fusion.graph import LAYOUTS, Value, before
from xlafuse.fusion.spelling import Proposal, Spelling
from xlafuse.fusion.terms import ELEMENTWISE

_NO_LABEL = -(2**31)
_BACK = ELEMENTWISE | LAYOUTS | {"add", "sub", "mul", "div", "square", "integer_pow", "reduce_sum", "gather"}
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
    if shape == rows.shape:  # a number for each logit, as in a softmax
        return
    arrays = {
        "logits": jax.ShapeDtypeStruct((*shape, _vocabulary(rows)), rows.dtype),
        "labels": jax.ShapeDtypeStruct(shape, jnp.int32),
    }
    order = () if is_total else tuple(range(len(shape)))
    static = {"result_in": value.dtype, "shape": (*shape, _vocabulary(rows))}
    yield Proposal(arrays=arrays, order=order, static=static)


def _vocabulary(rows: Value) -> int:
    """Returns the size of the axis whose maximum is taken."""
    (axis,) = next(user.params["axes"] for user in rows.users if user.primitive == "reduce_max")
    return rows.shape[axis]


def _at(rows: jax.Array, labels: jax.Array) -> jax.Array:
    """Takes the logits of labels, as `take_along_axis` does for labels from 0 on, which slices axes of length 1."""
    last = rows.ndim - 1
    sliced = tuple(axis for axis in range(last) if rows.shape[axis] == 1)
    batching = tuple(axis for axis in range(last) if axis not in sliced)
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=sliced,
        collapsed_slice_dims=(last,),
        start_index_map=(last,),
        operand_batching_dims=batching,
        start_indices_batching_dims=tuple(range(len(batching))),
    )
    indices = labels.reshape(*(rows.shape[axis] for axis in batching), 1, 1)
    found = jax.lax.gather(rows, indices, numbers, (1,) * rows.ndim, mode="fill", fill_value=jnp.nan)
    return found.reshape(labels.shape)


def _of_optax(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    return jax.nn.logsumexp(logits, axis=-1) - _at(logits, labels)


def _by_hand(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.log(jnp.sum(jnp.exp(logits - maximum), axis=-1)) + maximum[..., 0] - _at(logits, labels)


def _log_likelihood(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    return _at(jax.nn.log_softmax(logits, axis=-1), labels)


def _negative(logits: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    return -_at(jax.nn.log_softmax(logits, axis=-1), labels)


def _one_hot(labels: jax.Array, classes: int, dtype: Any) -> jax.Array:
    return jax.nn.one_hot(labels, classes, dtype=dtype)


def _smoothed(labels: jax.Array, classes: int, dtype: Any, *, kept: float, even: float) -> jax.Array:
    """Returns the target of `optax.smooth_labels`."""
    return kept * jax.nn.one_hot(labels, classes, dtype=dtype) + even


def _chosen(labels: jax.Array, classes: int, dtype: Any, *, on: float, even: float) -> jax.Array:
    """Returns the target that has a number at the label and another one elsewhere, as Flax's examples have it."""
    return jnp.where(labels[..., None] == jnp.arange(classes), jnp.asarray(on, dtype), jnp.asarray(even, dtype))


def _likelihood_of(
    target: Any, logits: jax.Array, labels: jax.Array, *, result_in: Any, shape: Any, axis: Any = -1, **numbers: float
) -> jax.Array:
    own = target(labels, shape[-1], result_in, **numbers)
    return jnp.sum(own * jax.nn.log_softmax(logits), axis=axis)


def _loss_of(target: Any, *arrays: jax.Array, **given: Any) -> jax.Array:
    return -_likelihood_of(target, *arrays, **given)


def _with_z_loss(
    function: Any, logits: jax.Array, labels: jax.Array, *, z_loss: float, is_mean: bool = False, **given: Any
) -> jax.Array:
    """Adds a factor of the squared logsumexp. is_mean: to the mean of the losses, the sum of all squares."""
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    losses = function(logits=logits, labels=labels, **given)
    return jnp.mean(losses) + z_loss * jnp.sum(squares) if is_mean else losses + z_loss * squares


def _classes(given: Mapping[str, Any]) -> int:
    return given["shape"][-1]


def _uneven(given: Mapping[str, Any]) -> str:
    """Says that a smoothed target's numbers are not those of one weight."""
    others = _classes(given) - ("on" in given)
    total = given.get("kept", 0.0) + given.get("on", 0.0) + given.get("even", 0.0) * others
    smoothing = given.get("even", 0.0) * _classes(given)
    if abs(total - 1) < 1e-5 and 0 <= smoothing <= 1:
        return ""
    return f"its smoothed labels sum to {total:.7g}, and those of cross_entropy to 1"


def _options(given: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    if "even" in given:
        more["label_smoothing"] = given["even"] * _classes(given)
    if "z_loss" in given:
        more["z_loss"] = given["z_loss"] * (math.prod(given["shape"][:-1]) if more.get("reduction") == "mean" else 1)
    return more


_TARGETS: tuple[tuple[Any, dict[str, float]], ...] = (
    (_one_hot, {}),
    (_smoothed, {"kept": 0.8765412321, "even": 0.0012345321}),
    (_chosen, {"on": 0.8765412321, "even": 0.0012345321}),
)
_Z_LOSS = {"z_loss": 0.0004321321}


def _spellings() -> Iterator[Spelling]:
    common: dict[str, Any] = {"operation": "cross_entropy", "propose": _losses, "floating": frozenset(("logits",))}
    is_total: dict[str, Any] = {"propose": functools.partial(_losses, is_total=True)}
    arguments = functools.partial(_options, ignore_index=_NO_LABEL)
    ends, sums = frozenset(("sub", "add", "neg")), frozenset(("sub", "add"))
    for function in (_of_optax, _by_hand, _negative):
        yield Spelling(function=function, roots=ends, arguments=arguments, **common)
        added = functools.partial(_with_z_loss, function)
        squared = {**common, "roots": sums, "unknowns": _Z_LOSS}
        yield Spelling(function=added, arguments=arguments, **squared)
        mean = functools.partial(arguments, reduction="mean")
        yield Spelling(function=functools.partial(added, is_mean=True), arguments=mean, **squared | is_total)
    yield Spelling(function=_log_likelihood, roots=frozenset(("gather",)), negated=True, arguments=arguments, **common)
    arguments = functools.partial(_options, ignore_index=None)
    for target, numbers in _TARGETS:
        soft = {**common, "unknowns": numbers, "objection": _uneven, "arguments": arguments}
        for function, root in ((_loss_of, "neg"), (_likelihood_of, "reduce_sum")):
            own = {**soft, "roots": frozenset((root,)), "negated": root != "neg"}
            function = functools.partial(function, target)
            yield Spelling(function=function, **own)
            own |= {**is_total, "arguments": functools.partial(arguments, reduction="sum")}
            yield Spelling(function=functools.partial(function, axis=None), **own)
        added = functools.partial(_with_z_loss, functools.partial(_loss_of, target))
        yield Spelling(function=added, **soft | {"roots": sums, "unknowns": numbers | _Z_LOSS})


SPELLINGS: tuple[Spelling, ...] = tuple(_spellings())
