"""The backward pass on Mosaic GPU: prepares the inputs of its kernels, and finishes their results."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.ops.attention.backward.config import (
    BackwardConfig,
    KeysConfig,
    QueriesConfig,
    can_be_one,
    tuned_backward,
    two_kernels,
)
from pallas_kernels.ops.attention.backward.keys import key_gradients
from pallas_kernels.ops.attention.backward.keys_launch import has_warps_apart
from pallas_kernels.ops.attention.backward.queries import query_gradients
from pallas_kernels.ops.attention.backward.tiles import MARK, Inputs
from pallas_kernels.ops.attention.dense import TILE
from pallas_kernels.ops.attention.masking import segment_tiles
from pallas_kernels.ops.attention.problem import Extras, Problem
from pallas_kernels.primitives.exponents import LOG2_E
from pallas_kernels.primitives.platform import varying_like

_FAR = -1e5


def attention_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    extras: Extras | None = None,
    *,
    problem: Problem,
    dlse: jax.Array | None = None,
    config: BackwardConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Extras]:
    """Returns the gradients of query, key, value, and of the bias and the sinks among the extras.

    Args:
        out, lse: of `attention_forward`.
        dout: the cotangent of out, and like it.
        dlse: that of lse, (batch, heads, queries) float32, or None for zeros.
        config: None: the measured best, else the default.
    """
    extras = extras or Extras()
    config = config or tuned_backward(problem)
    rows = rows_of(problem, extras, out, lse, dout, dlse)
    inputs = Inputs(query, key, value, dout, rows, {})
    # JAX's warps accept no array that varies over the devices of `jax.shard_map`.
    varies = jax.typeof(query).manual_axis_type.varying
    if config.queries is None and varies and has_warps_apart(problem):
        config = two_kernels(problem)
    if config.queries is None:
        assert can_be_one(problem)
        whole, dscores = _with_whole_tiles(problem, config.keys.columns), None
        dq, dk, dv = key_gradients(inputs, problem=whole, config=config.keys)
    else:
        by_keys, by_queries = _extras(extras, problem, config.keys, config.queries)
        own = inputs._replace(extras=by_queries)
        dq, dscores = query_gradients(own, problem=problem, config=config.queries)
        dk, dv = key_gradients(inputs._replace(extras=by_keys), problem=problem, config=config.keys)
    dquery, dkey, dvalue = (varying_like(gradient, query) for gradient in (dq, dk, dv))
    dbias = None
    if dscores is not None:
        assert extras.bias is not None
        dscores = varying_like(dscores[:, :, : query.shape[1], : key.shape[1]], query)
        axes = tuple(axis for axis, size in enumerate(extras.bias.shape) if size == 1)
        dbias = jnp.sum(dscores, axis=axes, keepdims=True).astype(extras.bias.dtype)
    if problem.masking.keys == 1 and dlse is None and extras.sinks is None:
        # The probability of a single key is 1 whatever its score: these gradients could only be rounding errors.
        dquery, dkey, dbias = jax.tree.map(lambda x: varying_like(jnp.zeros_like(x), x), (dquery, dkey, dbias))
    dsinks = None
    if extras.sinks is not None:
        # A sink has no value, so that its weight's gradient is -delta alone.
        base_2, delta = (rows[:, :, i, : lse.shape[2]] for i in (0, 1))
        weights = jnp.exp2(extras.sinks[:, None] * LOG2_E - base_2)
        dsinks = varying_like(-jnp.sum(weights * delta, axis=(0, 2)), query)
    return dquery, dkey, dvalue, Extras(bias=dbias, sinks=dsinks)


def rows_of(
    problem: Problem,
    extras: Extras,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> jax.Array:
    """Three numbers a query, (batch, heads, 3, queries padded with zeros to whole tiles), float32.

    lse in base 2, 0 for -inf; where it is that of hidden scores alone, `MARK` times their number: a float32 near a mask
    value below -1e5 does not hold the logarithm of a number (at -1e5, to 0.4 %). delta = sum(dout * out) - dlse, which
    the softmax subtracts from the gradients of a query's weights. And the query's number.
    """
    base_2 = jnp.where(lse == -jnp.inf, 0, lse * LOG2_E)
    if extras.mask is not None and -math.inf < problem.hidden < _FAR:
        seen = jnp.sum(lax.population_count(extras.mask), axis=3, dtype=jnp.uint32).astype(jnp.float32)
        highest = (1 - 1e-6) * problem.hidden / LOG2_E + math.log(problem.masking.keys)
        base_2 = jnp.where(lse <= highest, MARK * (problem.masking.keys - seen), base_2)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    # Fused with the transposition, XLA's reduction takes five times as long.
    delta = lax.optimization_barrier(delta).transpose(0, 2, 1)
    if dlse is not None:
        delta = delta - jnp.where(lse == -jnp.inf, 0, dlse)
    places = jnp.broadcast_to(jnp.arange(lse.shape[2], dtype=jnp.float32), lse.shape)
    stacked = jnp.stack([base_2, delta, places], axis=2)
    return jnp.pad(stacked, ((0, 0), (0, 0), (0, 0), (0, -stacked.shape[3] % TILE)))


def _with_whole_tiles(problem: Problem, columns: int) -> Problem:
    """The problem with keys of zeros up to a whole tile, which need not be masked.

    A causal mask hides them; else weights are bounded.
    """
    masking = problem.masking
    whole = replace(masking, keys=pl.cdiv(masking.keys, columns) * columns)
    bounds_weights = masking.right is None and whole != masking
    return replace(problem, masking=whole, clips=problem.in_panels, bounds_weights=bounds_weights)


def _extras(
    extras: Extras, problem: Problem, by_key: KeysConfig, by_query: QueriesConfig
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The extras of the kernel of dkey and dvalue, and of that of dquery; see `Inputs`."""
    keys, masking = problem.masking.keys, problem.masking
    # An unused zero follows the numbers, without which XLA would count in a kernel each time.
    places = np.append(np.arange(keys + -keys % TILE, dtype=np.int32), np.int32(0))
    by_queries = extras.padded(TILE, TILE)
    by_keys = {name: array.swapaxes(2, 3) if array.ndim == 4 else array for name, array in by_queries.items()}
    by_queries["places"] = jnp.asarray(places)
    if extras.segments is not None:
        own, other = extras.segments
        by_keys["tiles"] = segment_tiles(masking.query_tiles, other, own, by_key.columns, by_key.rows)
        by_queries["tiles"] = segment_tiles(masking.key_tiles, own, other, by_query.rows, by_query.columns)
    return by_keys, by_queries
