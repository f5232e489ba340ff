"""Which weights dropout keeps: the same in every kernel and in the reference, however the work is cut.

The four weights whose query and key are alike but for bit 3 (of value 8) share a random word, of which each makes bits
of its own by one multiplication. In the accumulators' layout one thread holds all four, whether queries lie along its
rows or along its columns, so that it makes the word once: the compiler sees that the places are one number. What is
left to an element is done on floats, as integers are compared at half their rate.

Source of the layout: PTX ISA, "Register fragments for wgmma.mma_async".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir.dialects import arith

from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.platform import is_interpreted
from pallas_kernels.primitives.random import (
    MEMBERS,
    PLACE_STEP,
    Words,
    epoch_word,
    key_words,
    mixed_words,
    shared_word,
)

_PERIOD = 2**32
_OTHER = 8
"""The bit in which the places of those that share a word differ, of queries and of keys."""
_COLUMNS = 8
"""Columns of a register of the accumulators' layout."""
_WHOLE_QUERIES, _WHOLE_KEYS = 128, 2 * _OTHER


class Grid:
    """The places of words: rows for (batch, head, query), columns for keys."""

    def __init__(self, *, batch: int, heads: int, queries: int, keys: int, period: int = _PERIOD):
        self.queries = -(-queries // _WHOLE_QUERIES) * _WHOLE_QUERIES
        self.keys = -(-keys // _WHOLE_KEYS) * _WHOLE_KEYS
        # Whole groups of queries, so that a tile of them lies in one epoch.
        self.rows_an_epoch = max(1, period // self.keys // _WHOLE_QUERIES) * _WHOLE_QUERIES
        self.has_epochs = batch * heads * self.queries > self.rows_an_epoch

    def row(self, head: Any, query: Any) -> jax.Array:
        """head: batch and head in one number."""
        return _uint32(head) * jnp.uint32(self.queries) + _uint32(query)

    def second(self, words: Words, row: jax.Array) -> jax.Array:
        """The second key word for a row."""
        return epoch_word(words[1], row // jnp.uint32(self.rows_an_epoch)) if self.has_epochs else words[1]


def keep_mask(key: jax.Array, batch: int, heads: int, queries: int, keys: int, *, rate: float) -> jax.Array:
    """Which weights are kept, boolean (batch, heads, queries, keys): the definition, in plain `jax.numpy`.

    Each with probability 1 - rate, exact to 2**-32.
    """
    grid = Grid(batch=batch, heads=heads, queries=queries, keys=keys)
    words = mixed_words(key_words(key))
    head, query, column = (jnp.arange(n, dtype=jnp.uint32) for n in (batch * heads, queries, keys))
    query = query[:, None]
    row = grid.row(head[:, None, None], query)
    other = jnp.uint32(_OTHER)
    place = (row & ~other) * jnp.uint32(grid.keys) + (column & ~other)
    word = shared_word(place * jnp.uint32(PLACE_STEP) + words[0], grid.second(words, row))
    bits = word * _member((query & other) != 0, (column & other) != 0)
    return _are_kept(bits, rate).reshape(batch, heads, queries, keys)


def with_kept(
    values: jax.Array,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    problem: Problem,
    words: Words,
    query_axis: int,
    head: Any,
    query: Any,
    key: Any,
) -> jax.Array:
    """combine(values, kept), in a kernel: kept is 1.0 where `keep_mask` is true, else 0.0.

    Args:
        values: a tile in the accumulators' layout, its lengths multiples of 16.
        combine: of some of the tile's columns.
        words: of `mixed_words`.
        query_axis: the axis along which queries lie.
        head: of the queries, that of all batches counted on.
        query, key: the tile's first ones, multiples of 64 and of 16.
    """
    masking = problem.masking
    grid = Grid(batch=problem.batch, heads=problem.heads, queries=masking.queries, keys=masking.keys)
    row = grid.row(head, query)
    second = grid.second(words, row)
    steps = [PLACE_STEP * step % _PERIOD for step in ((1, grid.keys) if query_axis else (grid.keys, 1))]
    # All but the constants of the loop below, once: the same for both rows of a thread, which are 8 apart.
    shape = (values.shape[0], _COLUMNS)
    first_axis, second_axis = (
        plgpu.broadcasted_iota(jnp.uint32, shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
    )
    # A kernel's loop goes along the second axis: all else is one number held throughout. Only `moving` is multiplied as
    # a scalar: uniform registers are few, and descriptors of products that do not fit in them are spilled.
    held, moving = (_uint32(key), row) if query_axis else (row, _uint32(key))
    own = ((first_axis & ~jnp.uint32(_OTHER)) + held) * jnp.uint32(steps[0]) + words[0]
    own = (own + (second_axis & ~jnp.uint32(1)) * jnp.uint32(steps[1])) + moving * jnp.uint32(steps[1])
    is_odd = (second_axis & jnp.uint32(1)) != 0
    is_other = (first_axis & jnp.uint32(_OTHER)) != 0
    members = [_member(half, is_other) if query_axis else _member(is_other, half) for half in (False, True)]
    parts = []
    for column in range(0, values.shape[1], _COLUMNS):
        half, block = column // _OTHER % 2, column - column % (2 * _OTHER)
        here, next_ = (jnp.uint32(steps[1] * c % _PERIOD) for c in (block, block + 1))
        word = shared_word(own + jnp.where(is_odd, next_, here), second)
        kept = _as_kept(word * members[half], problem.dropout_rate)
        parts.append(combine(values[:, column : column + _COLUMNS], kept))
    return lax.concatenate(parts, 1)


def _member(is_other_query: Any, is_other_key: Any) -> jax.Array:
    """The multiplier of an element of the four; each condition a Python boolean or an array."""
    own, other = (_choose(is_other_key, *(jnp.uint32(m) for m in MEMBERS[i : i + 2])) for i in (0, 2))
    return _choose(is_other_query, own, other)


def _choose(is_other: Any, own: jax.Array, other: jax.Array) -> jax.Array:
    return (other if is_other else own) if isinstance(is_other, bool) else jnp.where(is_other, other, own)


def _limit(rate: float) -> int:
    """Elements whose lower 31 bits are below it are kept."""
    return round((1 - rate) * 2**31)


def _are_kept(bits: jax.Array, rate: float) -> jax.Array:
    return (bits & jnp.uint32(2**31 - 1)) < jnp.uint32(_limit(rate))


def _as_kept(bits: jax.Array, rate: float) -> jax.Array:
    """`_are_kept` as 1.0 and 0.0.

    Floats without a sign compare as their bits do, and not-a-number, which has the greatest bits, saturates to 0. The
    difference from the limit is scaled such that the least one is 1.
    """
    limit = _limit(rate)
    exponent = (limit >> 23) - 127
    if not -103 <= exponent <= 127:
        # A limit that is no finite float, or one of which the scale would not be.
        return jnp.where(_are_kept(bits, rate), 1.0, 0.0)
    scale = 2.0 ** max(0, 24 - exponent)
    value = jnp.abs(lax.bitcast_convert_type(bits, jnp.float32))
    scaled = value if scale == 1 else value * scale
    return _saturated(float(np.uint32(limit).view(np.float32)) * scale - scaled)


def _saturated(value: jax.Array) -> jax.Array:
    """Clamped to 0 and 1, not-a-number to 0: a modifier of the instruction that made the value.

    `jnp.clip` would keep not-a-number, for which there is no such modifier: two instructions at half rate.
    """
    if is_interpreted():
        return jnp.where(value > 0, jnp.minimum(value, 1.0), 0.0)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(value.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def saturate(_, array):
        zero, one = (mgpu.c(bound, array.mlir_dtype) for bound in (0.0, 1.0))
        return array.foreach(lambda x, _: arith.minnumf(arith.maxnumf(x, zero), one), create_array=True)

    return saturate(value)  # pyright: ignore[reportCallIssue]: JAX gives the first argument


def _uint32(value: Any) -> jax.Array:
    return jnp.asarray(value).astype(jnp.uint32)
