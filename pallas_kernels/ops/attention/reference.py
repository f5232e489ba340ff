"""Attention in plain `jax.numpy`, forward and backward; also `implementation="xla"`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim

from pallas_kernels.ops.attention.dense import four_axes
from pallas_kernels.ops.attention.dropout import keep_mask
from pallas_kernels.ops.attention.problem import Segments, Window, masking_of, seen_pairs

SCORES_BYTES = 16 * 2**30
"""The most bytes of scores at once: if all heads would take more, one key head is computed at a time."""


def attention_reference(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    segment_ids: Segments = None,
    softcap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_mask: jax.Array | None = None,
    mask_value: float | None = None,
    sinks: jax.Array | None = None,
    deterministic: bool = True,
    return_residuals: bool = False,
):
    """See `pallas_kernels.attention`. Keeps all scores in memory, or those of one key head if they are too many.

    Computes in float32 (float64 for float64 inputs).
    """
    del deterministic  # of the kernels
    given = {"bias": bias, "mask": mask, "is_causal": is_causal, "scale": scale, "window": window}
    given |= {"segment_ids": segment_ids, "softcap": softcap, "mask_value": mask_value}
    batch, queries, heads, _ = query.shape
    size = 4 * batch * heads * queries * key.shape[1]
    is_too_much = not is_symbolic_dim(size) and size > SCORES_BYTES
    if is_too_much and not dropout_rate and key.shape[2] > 1:
        out, lse = _head_by_head(query, key, value, sinks, given)
    else:
        keep = kept(query, key, dropout_rate, dropout_key, dropout_mask)
        out, lse = _attend(query, key, value, sinks, given, dropout_rate, keep)
    return (out, lse) if return_residuals else out


def _attend(query, key, value, sinks, given, dropout_rate: float = 0.0, keep=None) -> tuple[jax.Array, jax.Array]:
    scores = masked_scores(query, key, **given)
    maximum = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    sinks = None if sinks is None else sinks.astype(scores.dtype).reshape(key.shape[2], -1, 1, 1)
    maximum = lax.stop_gradient(maximum if sinks is None else jnp.maximum(maximum, sinks))
    maximum = jnp.where(maximum == -jnp.inf, 0, maximum)
    weights = jnp.exp(scores - maximum)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - maximum)
    is_empty = total == 0
    weights = weights / jnp.where(is_empty, 1, total)
    out = weighted_values(weights, value, query, dropout_rate, keep)
    lse = jnp.where(is_empty, -jnp.inf, maximum + jnp.log(jnp.where(is_empty, 1, total)))
    return out, lse.reshape(query.shape[0], query.shape[2], query.shape[1])


def _head_by_head(query, key, value, sinks, given) -> tuple[jax.Array, jax.Array]:
    batch, queries, heads, size = query.shape
    key_heads = key.shape[2]
    own = {name: _by_head(given[name], key_heads) for name in ("bias", "mask") if _has_heads(given[name])}
    operands = (
        jnp.moveaxis(query.reshape(batch, queries, key_heads, heads // key_heads, size), 2, 0),
        jnp.moveaxis(key[:, :, :, None], 2, 0),
        jnp.moveaxis(value[:, :, :, None], 2, 0),
        None if sinks is None else sinks.reshape(key_heads, -1),
        own,
    )

    def one(operands):
        query, key, value, sinks, own = operands
        return _attend(query, key, value, sinks, {**given, **own})

    out, lse = lax.map(one, operands)
    out = jnp.moveaxis(out, 0, 2).reshape(*query.shape[:3], value.shape[3])
    return out, jnp.moveaxis(lse, 0, 1).reshape(batch, heads, queries)


def _has_heads(dense: jax.Array | None) -> bool:
    return dense is not None and dense.ndim > 2 and dense.shape[-3] > 1


def _by_head(dense: jax.Array, key_heads: int) -> jax.Array:
    """dense as (key heads, batch, group, queries, keys)."""
    dense = four_axes(dense)
    batch, heads, queries, keys = dense.shape
    return jnp.moveaxis(dense.reshape(batch, key_heads, heads // key_heads, queries, keys), 1, 0)


def masked_scores(
    query: jax.Array,
    key: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    segment_ids: Segments = None,
    softcap: float | None = None,
    mask_value: float | None = None,
) -> jax.Array:
    """Returns the scores before the softmax, (batch, key heads, group, queries, keys), float32 or wider.

    It is `mask_value` where hidden; None: -inf.
    """
    heads, key_heads = query.shape[2], key.shape[2]
    scores = _scores(query, key, scale, softcap)
    if bias is not None:
        scores = scores + _grouped(bias, key_heads, heads).astype(scores.dtype)
    masking = masking_of(query.shape[1], key.shape[1], is_causal, window, segment_ids is not None)
    seen = seen_pairs(masking, segment_ids)
    seen = None if seen is None else _grouped(seen, key_heads, heads)
    if mask is not None:
        mask = _grouped(mask, key_heads, heads)
        seen = mask if seen is None else seen & mask
    return scores if seen is None else jnp.where(seen, scores, -jnp.inf if mask_value is None else mask_value)


def weighted_values(
    weights: jax.Array, value: jax.Array, query: jax.Array, dropout_rate: float, keep: jax.Array | None
) -> jax.Array:
    """dropout(weights) @ value, (batch, queries, heads, value's head size).

    weights: (batch, key heads, group, queries, keys). keep: see `kept`.
    """
    if keep is not None:
        weights = jnp.where(_grouped(keep, value.shape[2], query.shape[2]), weights / (1 - dropout_rate), 0)
    out = jnp.einsum("bkgts,bskd->btkgd", weights.astype(value.dtype), value, preferred_element_type=weights.dtype)
    return out.reshape(*query.shape[:3], value.shape[3]).astype(query.dtype)


def kept(
    query: jax.Array, key: jax.Array, rate: float, dropout_key: jax.Array | None, dropout_mask: jax.Array | None
) -> jax.Array | None:
    """The weights that dropout keeps, broadcastable to (batch, heads, queries, keys); None if that is all."""
    if dropout_mask is not None or not rate:
        return dropout_mask
    assert dropout_key is not None
    batch, queries, heads, _ = query.shape
    return keep_mask(dropout_key, batch, heads, queries, key.shape[1], rate=rate)


def _scores(query: jax.Array, key: jax.Array, scale: float | None, softcap: float | None) -> jax.Array:
    """The scores before bias and mask, (batch, key heads, group, queries, keys)."""
    batch, queries, heads, size = query.shape
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, queries, key.shape[2], heads // key.shape[2], size)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=wide)
    scores = scores * (1 / math.sqrt(size) if scale is None else scale)
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _grouped(dense: jax.Array, key_heads: int, heads: int) -> jax.Array:
    """A mask or bias that broadcasts to (batch, heads, queries, keys), reshaped to broadcast to grouped scores."""
    dense = four_axes(dense)
    batch, own, queries, keys = dense.shape
    if own == 1:
        return dense[:, :, None]
    return dense.reshape(batch, key_heads, heads // key_heads, queries, keys)
