"""The weights that dropout keeps: the same in every kernel and in the reference, however the work is split.

16 weights share a random word: those whose queries differ in bit 3 alone, and whose keys differ in bits 0, 3 and 4
alone. For keys with bit 4 set, the halves of the word are swapped. The word is multiplied by four numbers, one for each
query and each value of the keys' bit 3; an even key and the odd one after it take 16 bits of a product each.

In the accumulators' layout with queries along rows, one thread holds all 16 weights. With queries along columns, a
thread holds four of the 16, and computes the word for these alone. The rest of the work is done on float32, as integers
are compared at half their rate.

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
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import llvm

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

_ROW_AXIS = 4
"""The axis of the layout's array of registers along which the two rows of a thread lie."""

Members = tuple[int, int]
"""The numbers that a word is multiplied by, for a thread's first row and for the other one."""


def saturated(value: jax.Array) -> jax.Array:
    """value clamped to [0, 1], NaN to 0: a free modifier of the instruction that computes the value.

    `jnp.clip` would keep NaN, for which there is no such modifier: two instructions at half rate.
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


def bits_of_halves(word: jax.Array, members: Members) -> jax.Array:
    """Products of words and members, (64, 8) uint32: even columns have the lower half in front.

    A thread computes its elements once, as it has one word; the compiler may not see that.
    """
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(word.shape, jnp.uint32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def multiply(_, words):
        i32 = ir.IntegerType.get_signless(32)
        own = llvm.extractelement(words.registers.flat[0], mgpu.c(0, i32))
        registers = np.empty_like(words.registers)
        for place in np.ndindex(*registers.shape):
            product = arith.muli(own, mgpu.c(members[place[_ROW_AXIS]], i32))
            even = arith.shli(product, mgpu.c(16, i32))
            registers[place] = vector.from_elements(ir.VectorType.get((2,), i32), [even, product])
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=False)

    return multiply(word)  # pyright: ignore[reportCallIssue]: JAX gives the first argument


def permuted(word: jax.Array, order: jax.Array) -> jax.Array:
    """The bytes of (64, 8) words in another order, as `prmt` takes it, with zeros as the second operand.

    A thread's two rows have the same words, and all its elements the same order: one register is computed for both.
    """
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(word.shape, word.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=result)
    def permute(_, words, orders):
        i32 = ir.IntegerType.get_signless(32)
        own = llvm.extractelement(orders.registers.flat[0], mgpu.c(0, i32))
        pair = (llvm.extractelement(words.registers.flat[0], mgpu.c(i, i32)) for i in range(2))
        permuted = [llvm.inline_asm(i32, [each, own], "prmt.b32 $0, $1, 0, $2;", "=r,r,r") for each in pair]
        register = vector.from_elements(ir.VectorType.get((2,), i32), permuted)
        registers = np.full_like(words.registers, register)
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=words.is_signed)

    return permute(word, order)  # pyright: ignore[reportCallIssue]: JAX gives the first argument


_PERIOD = 2**32
_HALF, _OTHER, _FAR = 1, 8, 16
"""The bits in which the places of weights that share a word differ: all three of keys, the second of queries."""
_KEY_BITS = _HALF | _OTHER | _FAR
_KEYS = 2 * _FAR
"""Keys that share words are in one group of so many."""
_COLUMNS = 8
"""Columns of a register of the accumulators' layout."""
_WHOLE_QUERIES = 128


class Grid:
    """The places of words: rows for (batch, head, query), columns for keys."""

    def __init__(self, *, batch: int, heads: int, queries: int, keys: int, period: int = _PERIOD):
        self.queries = -(-queries // _WHOLE_QUERIES) * _WHOLE_QUERIES
        self.keys = -(-keys // _KEYS) * _KEYS
        # Whole groups of queries, so that a query tile lies in one epoch.
        self.rows_an_epoch = max(1, period // self.keys // _WHOLE_QUERIES) * _WHOLE_QUERIES
        self.has_epochs = batch * heads * self.queries > self.rows_an_epoch

    def row(self, head: Any, query: Any) -> jax.Array:
        """The row of a query; head: counted over all batch entries."""
        return _uint32(head) * jnp.uint32(self.queries) + _uint32(query)

    def second(self, words: Words, row: jax.Array) -> jax.Array:
        """The second key word of a row."""
        return epoch_word(words[1], row // jnp.uint32(self.rows_an_epoch)) if self.has_epochs else words[1]


def keep_mask(key: jax.Array, batch: int, heads: int, queries: int, keys: int, *, rate: float) -> jax.Array:
    """The weights that dropout keeps, boolean (batch, heads, queries, keys): the definition, in plain `jax.numpy`.

    Each is kept with probability 1 - rate, rounded to a multiple of 2**-15.
    """
    grid = Grid(batch=batch, heads=heads, queries=queries, keys=keys)
    words = mixed_words(key_words(key))
    head, query, column = (jnp.arange(n, dtype=jnp.uint32) for n in (batch * heads, queries, keys))
    query = query[:, None]
    row = grid.row(head[:, None, None], query)
    place = _without(row, _OTHER) * jnp.uint32(grid.keys) + _without(column, _KEY_BITS)
    word = _of_key(shared_word(place * jnp.uint32(PLACE_STEP) + words[0], grid.second(words, row)), column)
    own, other = (jnp.where(_has(column, _OTHER), *map(jnp.uint32, pair[::-1])) for pair in MEMBERS)
    bits = word * jnp.where(_has(query, _OTHER), other, own)
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
    """combine(values, kept) in a kernel, where kept is 1.0 where `keep_mask` is true, else 0.0.

    Args:
        values: a tile in the accumulators' layout, its lengths multiples of 16 queries and 32 keys.
        combine: called for eight columns at a time.
        words: see `mixed_words`.
        query_axis: the axis along which queries lie.
        head: of the queries, counted over all batch entries.
        query, key: the tile's first ones, multiples of 64 and of 32.
    """
    words_of = _words_of(values.shape[0], problem, words, query_axis, head, query, key)
    parts = []
    for column in range(0, values.shape[1], _COLUMNS):
        if query_axis:
            own, other = map(jnp.uint32, MEMBERS[_has(column, _OTHER)])
            is_other = _has(_places(values.shape[0], 0), _OTHER)
            bits = words_of(column - column % (2 * _OTHER)) * jnp.where(is_other, other, own)
        else:
            bits = _bits_of_rows(words_of(column), _members_at(column))
        parts.append(combine(values[:, column : column + _COLUMNS], _as_kept(bits, problem.dropout_rate)))
    return lax.concatenate(parts, 1)


def _words_of(rows: int, problem: Problem, words: Words, query_axis: int, head: Any, query: Any, key: Any):
    """Returns a function from a column to the words of the eight columns from there on.

    Eight columns are 8 keys, or 8 queries that share words with the next 8. Halves are swapped for keys with bit 4; if
    keys lie along rows, those of even keys are also in front.
    """
    masking = problem.masking
    grid = Grid(batch=problem.batch, heads=problem.heads, queries=masking.queries, keys=masking.keys)
    row = grid.row(head, query)
    second = grid.second(words, row)
    steps = [PLACE_STEP * step % _PERIOD for step in ((1, grid.keys) if query_axis else (grid.keys, 1))]
    # Everything but the columns' constants is computed once. It is the same for both rows of a thread, 8 apart.
    first_axis, second_axis = (_places(rows, axis) for axis in (0, 1))
    # A kernel's loop moves along the second axis; everything else is one number that a thread holds throughout. Only
    # `moving` is multiplied as a scalar: uniform registers are few, and wgmma descriptors beyond them are spilled.
    held, moving = (_uint32(key), row) if query_axis else (row, _uint32(key))
    own = (_without(first_axis, _KEY_BITS if query_axis else _OTHER) + held) * jnp.uint32(steps[0]) + words[0]
    own = (own + _without(second_axis, _HALF) * jnp.uint32(steps[1])) + moving * jnp.uint32(steps[1])
    if not query_axis:

        def words_of_keys(column: int) -> jax.Array:
            word = shared_word(own + jnp.uint32(steps[1] * (column - column % _KEYS) % _PERIOD), second)
            return _turned(word) if _has(column, _FAR) else word

        return words_of_keys
    is_odd, order = _has(second_axis, _HALF), _order_of_key(first_axis)

    def words_of(column: int) -> jax.Array:
        here, next_ = (jnp.uint32(steps[1] * c % _PERIOD) for c in (column, column + 1))
        word = shared_word(own + jnp.where(is_odd, next_, here), second)
        return _of_key(word, first_axis) if is_interpreted() else permuted(word, order)

    return words_of


def _places(rows: int, axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.uint32, (rows, _COLUMNS), axis, layout=plgpu.Layout.WGMMA)


def _of_key(word: jax.Array, key: jax.Array) -> jax.Array:
    """The word with a key's half in front: a permutation of bytes."""
    word = jnp.where(_has(key, _FAR), _turned(word), word)
    return jnp.where(_has(key, _HALF), word, word << jnp.uint32(16))


def _order_of_key(key: jax.Array) -> jax.Array:
    """That permutation, as `permuted` takes it."""
    near, far = (
        jnp.where(_has(key, _HALF), *(jnp.uint32(order) for order in pair))
        for pair in ((0x3210, 0x1044), (0x1032, 0x3244))
    )
    return jnp.where(_has(key, _FAR), far, near)


def _turned(word: jax.Array) -> jax.Array:
    return (word << jnp.uint32(16)) | (word >> jnp.uint32(16))


def _members_at(column: int) -> Members:
    """The members for eight keys from a multiple of 8 on; even keys have the lower 16 bits of the product."""
    own, other = (keys[_has(column, _OTHER)] for keys in MEMBERS)
    return own, other


def _bits_of_rows(word: jax.Array, members: Members) -> jax.Array:
    """The 16 random bits of each of (64, 8) weights, in front of others that decide nothing."""
    if is_interpreted():
        product = word * jnp.where(_has(_places(64, 0), _OTHER), *map(jnp.uint32, members[::-1]))
        return jnp.where(_has(_places(64, 1), _HALF), product, product << jnp.uint32(16))

    return bits_of_halves(word, members)


def _has(place: Any, bit: int) -> Any:
    return (place & bit) != 0


def _without(place: jax.Array, bits: int) -> jax.Array:
    return place & jnp.uint32(_PERIOD - 1 - bits)


def _limit(rate: float) -> int:
    """The limit below which 31 random bits keep a weight; the first 15 of these bits decide."""
    return round((1 - rate) * 2**15) << 16


def _are_kept(bits: jax.Array, rate: float) -> jax.Array:
    return (bits & jnp.uint32(2**31 - 1)) < jnp.uint32(_limit(rate))


def _as_kept(bits: jax.Array, rate: float) -> jax.Array:
    """`_are_kept` as 1.0 and 0.0.

    Positive floats compare as their bits do, and NaN, which has the greatest bits, saturates to 0. The difference from
    the limit is scaled so that the least one is 1.
    """
    limit = _limit(rate)
    exponent = (limit >> 23) - 127
    if not -103 <= exponent <= 127:
        # The limit or the scale would not be finite.
        return jnp.where(_are_kept(bits, rate), 1.0, 0.0)
    scale = 2.0 ** max(0, 24 - exponent)
    value = jnp.abs(lax.bitcast_convert_type(bits, jnp.float32))
    scaled = value if scale == 1 else value * scale
    return saturated(float(np.uint32(limit).view(np.float32)) * scale - scaled)


def _uint32(value: Any) -> jax.Array:
    return jnp.asarray(value).astype(jnp.uint32)
