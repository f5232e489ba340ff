"""Attention's backward pass by XLA, from a log-sum-exp on, as the kernels compute it: the benchmark's baseline."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.ops.attention.arguments import Options
from pallas_kernels.ops.attention.reference import SCORES_BYTES, masked_scores, weighted_values
from pallas_kernels.ops.attention.specs import stand_in_lse
from pallas_kernels.specs import Arguments

_OPERANDS = ("query", "key", "value")


def backward(arguments: Arguments, dout: jax.Array) -> tuple[jax.Array, ...]:
    """Gradients from what the specs' Mosaic pass is given; one key head at a time if scores would be too many."""
    query, key, value = (arguments[name] for name in _OPERANDS)
    options = Options(**{name: each for name, each in arguments.items() if name not in _OPERANDS})
    lse = stand_in_lse(query, key)

    def gradients(query, key, value, bias, lse, dout):
        delta = jnp.sum(dout.astype(jnp.float32) ** 2, axis=-1)  # dout stands for the output

        def unnormalised(query, key, value, bias):
            scores = masked_scores(query, key, replace(options, bias=bias))
            weights = jnp.exp(scores - lse.reshape(scores.shape[:-1])[..., None])
            # The cotangent -delta of a row's sum subtracts what normalising the row does.
            sums = jnp.sum(weights, axis=-1).reshape(lse.shape)
            return weighted_values(weights, query, value, options), sums

        return jax.vjp(unnormalised, query, key, value, bias)[1]((dout, -delta.swapaxes(1, 2)))

    batch, queries, heads, _ = query.shape
    key_heads = key.shape[2]
    is_large = 4 * batch * heads * queries * key.shape[1] > SCORES_BYTES / 8
    if not is_large or options.dropout_rate or options.bias is not None or options.mask is not None:
        found = gradients(query, key, value, options.bias, lse, dout)
        return tuple(gradient for gradient in found if gradient is not None)

    def by_head(array):
        return jnp.moveaxis(array.reshape(batch, queries, key_heads, heads // key_heads, -1), 2, 0)

    def one(operands):
        query, key, value, lse, dout = operands
        return gradients(query, key, value, None, lse, dout)[:3]

    keys, values = (jnp.moveaxis(array[:, :, :, None], 2, 0) for array in (key, value))
    lses = jnp.moveaxis(lse.reshape(batch, key_heads, -1, queries), 1, 0)
    found = jax.lax.map(one, (by_head(query), keys, values, lses, by_head(dout)))
    return tuple(
        jnp.moveaxis(gradient, 0, 2).reshape(array.shape)
        for gradient, array in zip(found, (query, key, value), strict=True)
    )
