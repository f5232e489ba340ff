"""The arguments of `attention`, and the checks that they fit together."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pallas_kernels.primitives.checks import as_arrays, dropout_words, positive_number, static_flag, static_number

Window = int | tuple[int | None, int | None] | None
"""The number of keys seen before and after the query's own place, or one for both; None: all."""

Segments = jax.Array | tuple[jax.Array, jax.Array] | None
"""(batch, length) for both queries and keys, or one array for each."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of `attention`, but for `return_residuals` and `implementation`."""

    bias: jax.Array | None = None
    mask: jax.Array | None = None
    is_causal: bool = False
    scale: float | None = None
    window: Window = None
    segment_ids: Segments = None
    softcap: float | None = None
    dropout_rate: float = 0.0
    dropout_key: jax.Array | None = None
    dropout_mask: jax.Array | None = None
    mask_value: float | None = None
    sinks: jax.Array | None = None
    deterministic: bool = True

    @property
    def window_sides(self) -> tuple[int | None, int | None]:
        """The numbers of keys seen before and after, as Python integers."""
        left, right = self.window if isinstance(self.window, tuple) else (self.window, self.window)
        return None if left is None else operator.index(left), None if right is None else operator.index(right)

    @property
    def segments(self) -> tuple[jax.Array, jax.Array] | None:
        """The segments of queries and of keys."""
        if self.segment_ids is None:
            return None
        own, other = self.segment_ids if isinstance(self.segment_ids, tuple) else (self.segment_ids, self.segment_ids)
        return jnp.asarray(own), jnp.asarray(other)


def checked(query: jax.Array, key: jax.Array, value: jax.Array, options: Options) -> Options:
    """Returns the options with plain numbers. Raises TypeError or ValueError where arguments do not fit together."""
    flags = {name: static_flag("attention", name, getattr(options, name)) for name in ("is_causal", "deterministic")}
    _check_operands(query, key, value)
    for name in ("scale", "softcap"):
        if isinstance(getattr(options, name), jax.Array):
            raise TypeError(f"attention: {name} must be a Python number, got an array.")
    _check_window(options)
    (batch, queries, heads, _), keys = query.shape, key.shape[1]
    _check_dense(options, (batch, heads, queries, keys))
    if options.sinks is not None and not jnp.issubdtype(options.sinks.dtype, jnp.floating):
        raise TypeError(f"attention: sinks must be floating, got {options.sinks.dtype.name}.")
    if options.sinks is not None and options.sinks.shape != (heads,):
        raise ValueError(
            f"attention: sinks must be one number a query head, shape {(heads,)}; got {options.sinks.shape}."
        )
    _check_segments(options.segment_ids, batch, queries, keys)
    _check_dropout(options)
    # A NumPy float would make float64 of what it multiplies, under jax_enable_x64.
    kinds = {"scale": static_number, "softcap": positive_number, "mask_value": _hidden_score}
    kinds["dropout_rate"] = static_number
    given = {name: getattr(options, name) for name in kinds}
    numbers = {n: None if value is None else kinds[n]("attention", n, value) for n, value in given.items()}
    return replace(options, **flags, **numbers)


def check_heads(operation: str, **arrays: jax.Array) -> None:
    """Raises TypeError or ValueError unless the arrays, query first, have four axes and one floating dtype."""
    dtype = arrays["query"].dtype
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{operation}: {name} must be floating, got {array.dtype.name}; cast it first.")
        if array.dtype != dtype:
            raise TypeError(
                f"{operation}: {name} must have query's dtype {dtype.name}, got {array.dtype.name}; cast one of them "
                "first."
            )
        if array.ndim != 4:
            raise ValueError(f"{operation}: {name} must have four dimensions, got shape {array.shape}.")


def _check_operands(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    check_heads("attention", query=query, key=key, value=value)
    (batch, _, heads, size), key_heads = query.shape, key.shape[2]
    if (key.shape[0], key.shape[3]) != (batch, size) or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"attention: key must be (batch, keys, key heads, head size) with the batch and head size of query "
            f"{query.shape}, and value like it up to its own head size; got {key.shape} and {value.shape}."
        )
    if not key_heads or heads % key_heads:
        raise ValueError(f"attention: query's {heads} heads must be a multiple of key's {key_heads}.")


def _check_window(options: Options) -> None:
    window, hint = options.window, ""
    try:
        if all(side is None or side >= 0 for side in options.window_sides):
            return
    except (TypeError, ValueError):
        hint = ", and not traced" if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(window)) else ""
    raise ValueError(
        f"attention: window must be an integer or a tuple (left, right), each 0 or more or None{hint}; got {window!r}."
    )


def _check_dense(options: Options, scores: tuple[int, ...]) -> None:
    for name in ("bias", "mask", "dropout_mask"):
        if (array := getattr(options, name)) is None:
            continue
        if name == "bias" and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"attention: bias must be floating, got {array.dtype.name}.")
        if name != "bias" and array.dtype != jnp.bool_:
            hint = "; pass bias to add" if name == "mask" else ""
            raise TypeError(f"attention: {name} must be boolean (True keeps), got {array.dtype.name}{hint}.")
        pairs = zip(reversed(array.shape), reversed(scores), strict=False)
        if array.ndim > 4 or any(own not in (1, full) for own, full in pairs):
            raise ValueError(
                f"attention: {name} must broadcast to (batch, heads, queries, keys) {scores}, got {array.shape}."
            )


def _check_dropout(options: Options) -> None:
    rate, key = options.dropout_rate, options.dropout_key
    if options.dropout_mask is None:
        dropout_words(
            "attention", rate, key, key_name="dropout_key" if key is not None else "dropout_mask or dropout_key"
        )
        return
    if key is not None:
        raise ValueError("attention: dropout_mask and dropout_key are both given; pass one of them.")
    if static_number("attention", "dropout_rate", rate) == 0:
        raise ValueError("attention: dropout_mask needs the dropout_rate that it was drawn with, above 0; got 0.")
    dropout_words("attention", rate, jnp.zeros(2, jnp.uint32))  # for the rate alone


def _hidden_score(operation: str, name: str, value: Any) -> float:
    """The value of hidden scores, which must be a finite float32, as the scores are, below 0."""
    number = static_number(operation, name, value)
    if not float(jnp.finfo(jnp.float32).min) <= number < 0:
        raise ValueError(
            f"{operation}: {name} must be below 0 and finite in float32, got {value!r}; None stands for -inf."
        )
    return number


def _check_segments(segment_ids: Any, batch: int, queries: int, keys: int) -> None:
    if segment_ids is None:
        return
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError("attention: segment_ids must be one array or (of queries, of keys).")
    for ids, length in zip(pair, (queries, keys), strict=True):
        (array,) = as_arrays("attention", segment_ids=ids)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"attention: segment_ids must be integers, got {array.dtype.name}.")
        if array.shape != (batch, length):
            raise ValueError(f"attention: segment_ids must be (batch, length) {(batch, length)}, got {array.shape}.")
