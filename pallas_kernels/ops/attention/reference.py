"""Attention in plain `jax.numpy`, forward and backward; also `implementation="xla"`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim

from pallas_kernels.ops.attention.arguments import Options
from pallas_kernels.ops.attention.dense import four_axes
from pallas_kernels.ops.attention.dropout import keep_mask
from pallas_kernels.ops.attention.problem import masking_of, seen_pairs

SCORES_BYTES = 16 * 2**30
"""The most bytes of scores at once: if all heads would take more, one key head is computed at a time."""


def attention_reference(
    query: jax.Array, key: jax.Array, value: jax.Array, *, return_residuals: bool = False, **given: Any
) -> Any:
    """See `pallas_kernels.attention`. Keeps all scores in memory, or those of one key head if they are too many.

    Computes in float32 (float64 for float64 inputs).
    """
    options = Options(**given)
    batch, queries, heads, _ = query.shape
    size = 4 * batch * heads * queries * key.shape[1]
    is_too_much = not is_symbolic_dim(size) and size > SCORES_BYTES
    attend = _head_by_head if is_too_much and not options.dropout_rate and key.shape[2] > 1 else _attend
    out, lse = attend(query, key, value, options)
    return (out, lse) if return_residuals else out


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, options: Options) -> tuple[jax.Array, jax.Array]:
    scores, sinks = masked_scores(query, key, options), options.sinks
    maximum = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    sinks = None if sinks is None else sinks.astype(scores.dtype).reshape(key.shape[2], -1, 1, 1)
    maximum = lax.stop_gradient(maximum if sinks is None else jnp.maximum(maximum, sinks))
    maximum = jnp.where(maximum == -jnp.inf, 0, maximum)
    weights = jnp.exp(scores - maximum)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - maximum)
    is_empty = total == 0
    weights = weights / jnp.where(is_empty, 1, total)
    out = weighted_values(weights, query, value, options)
    lse = jnp.where(is_empty, -jnp.inf, maximum + jnp.log(jnp.where(is_empty, 1, total)))
    return out, lse.reshape(query.shape[0], query.shape[2], query.shape[1])


def _head_by_head(query: jax.Array, key: jax.Array, value: jax.Array, options: Options) -> tuple[jax.Array, jax.Array]:
    group = query.shape[2] // key.shape[2]
    dense = {"bias": options.bias, "mask": options.mask}
    dense = {name: four_axes(array) for name, array in dense.items() if array is not None}

    def one(head):
        def own(array, axis, count=group):
            return lax.dynamic_slice_in_dim(array, head * count, count, axis)

        others = {name: array if array.shape[1] == 1 else own(array, 1) for name, array in dense.items()}
        if options.sinks is not None:
            others["sinks"] = own(options.sinks, 0)
        return _attend(own(query, 2), own(key, 2, 1), own(value, 2, 1), replace(options, **others))

    out, lse = lax.map(one, jnp.arange(key.shape[2]))
    out = jnp.moveaxis(out, 0, 2).reshape(*query.shape[:3], value.shape[3])
    return out, jnp.moveaxis(lse, 0, 1).reshape(lse.shape[1], query.shape[2], -1)


def masked_scores(query: jax.Array, key: jax.Array, options: Options) -> jax.Array:
    """Returns the scores before the softmax, (batch, key heads, group, queries, keys), float32 or wider.

    It is `mask_value` where hidden; None: -inf.
    """
    (batch, queries, heads, size), key_heads = query.shape, key.shape[2]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, queries, key_heads, heads // key_heads, size)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=wide)
    scores = scores * (1 / math.sqrt(size) if options.scale is None else options.scale)
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    if options.bias is not None:
        scores = scores + _grouped(options.bias, key_heads, heads).astype(scores.dtype)
    seen = seen_pairs(masking_of(queries, key.shape[1], options), options.segments)
    seen = None if seen is None else _grouped(seen, key_heads, heads)
    if options.mask is not None:
        mask = _grouped(options.mask, key_heads, heads)
        seen = mask if seen is None else seen & mask
    hidden = -jnp.inf if options.mask_value is None else options.mask_value
    return scores if seen is None else jnp.where(seen, scores, hidden)


def weighted_values(weights: jax.Array, query: jax.Array, value: jax.Array, options: Options) -> jax.Array:
    """dropout(weights) @ value, (batch, queries, heads, value's head size).

    weights: (batch, key heads, group, queries, keys).
    """
    (batch, queries, heads, _), keep, rate = query.shape, options.dropout_mask, options.dropout_rate
    if keep is None and rate:
        assert options.dropout_key is not None
        keep = keep_mask(options.dropout_key, batch, heads, queries, value.shape[1], rate=rate)
    if keep is not None:
        weights = jnp.where(_grouped(keep, value.shape[2], heads), weights / (1 - rate), 0)
    out = jnp.einsum("bkgts,bskd->btkgd", weights.astype(value.dtype), value, preferred_element_type=weights.dtype)
    return out.reshape(*query.shape[:3], value.shape[3]).astype(query.dtype)


def _grouped(dense: jax.Array, key_heads: int, heads: int) -> jax.Array:
    """A mask or bias that broadcasts to (batch, heads, queries, keys), reshaped to broadcast to grouped scores."""
    dense = four_axes(dense)
    batch, own, queries, keys = dense.shape
    if own == 1:
        return dense[:, :, None]
    return dense.reshape(batch, key_heads, heads // key_heads, queries, keys)
