"""Which weights dropout keeps: the same in every kernel and in the reference, however the work is cut.

The four weights whose query and key are alike but for bit 3 (of value 8) share a random word. Two products of it, one
for each of the two keys, have 16 bits for each of the two queries. In the accumulators' layout one thread holds all
four, whether queries lie along its rows or along its columns, so that it makes the word once: the compiler sees that
the places are one number. What is left to an element is done on floats, as integers are compared at half their rate: on
floats of 32 bits, or on pairs of 16 bits where the weights are about to be rounded to 16 bits.

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
from jax.extend.mlir.dialects import arith
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

_PERIOD = 2**32
_OTHER = 8
"""The bit in which the places of those that share a word differ, of queries and of keys."""
_COLUMNS = 8
"""Columns of a register of the accumulators' layout."""
_ROW_AXIS = 4
"""Of that layout's array of registers: the two rows of a thread."""
_PACKED_LIMITS = 0x2C00, 0x7C00
"""From where on a float16 has a scale that makes its least difference 1, and the first that is no finite number."""
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

    Each with probability 1 - rate, rounded to a multiple of 2**-15.
    """
    grid = Grid(batch=batch, heads=heads, queries=queries, keys=keys)
    words = mixed_words(key_words(key))
    head, query, column = (jnp.arange(n, dtype=jnp.uint32) for n in (batch * heads, queries, keys))
    query = query[:, None]
    row = grid.row(head[:, None, None], query)
    other = jnp.uint32(_OTHER)
    place = (row & ~other) * jnp.uint32(grid.keys) + (column & ~other)
    word = shared_word(place * jnp.uint32(PLACE_STEP) + words[0], grid.second(words, row))
    bits = _of_query(word * _member((column & other) != 0), (query & other) != 0)
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
    words_of = _words_of(values.shape[0], problem, words, query_axis, head, query, key)
    parts = []
    for column in range(0, values.shape[1], _COLUMNS):
        half = bool(column & _OTHER)
        word, is_other = words_of(column - column % (2 * _OTHER))
        is_other_query, is_other_key = (half, is_other) if query_axis else (is_other, half)
        bits = _of_query(word * _member(is_other_key), is_other_query)
        parts.append(combine(values[:, column : column + _COLUMNS], _as_kept(bits, problem.dropout_rate)))
    return lax.concatenate(parts, 1)


def packed_unit(problem: Problem) -> float | None:
    """What `packed_kept` multiplies kept weights by; None where it does not serve.

    1.0 of a float16, as the bits of the weights' own type.
    """
    if not problem.dropout_rate or not _PACKED_LIMITS[0] <= _limit(problem.dropout_rate) >> 16 < _PACKED_LIMITS[1]:
        return None
    return float(np.float16(1.0).view(np.uint16).view(problem.dtype))


def packed_kept(columns: int, *, problem: Problem, words: Words, head: Any, query: Any, key: Any) -> jax.Array:
    """What 64 x columns weights of the problem's type are to be multiplied by, queries along the first axis.

    That is `packed_unit` or 0. As `with_kept`, with an instruction for two elements in place of one for each: two
    columns lie in one register, and so do, after a permutation of bytes, the random bits of the two, which have words
    of their own.
    """
    words_of = _words_of(64, problem, words, 0, head, query, key)
    parts = []
    for column in range(0, columns, _COLUMNS):
        word, is_other = words_of(column - column % (2 * _OTHER))
        product = word * _member(bool(column & _OTHER))
        if is_interpreted():
            kept = _are_kept(_of_query(product, is_other), problem.dropout_rate)
            parts.append(jnp.where(kept, jnp.float32(packed_unit(problem) or 0), jnp.float32(0)).astype(problem.dtype))
        else:
            parts.append(_mask_pairs(product, problem.dtype, _limit(problem.dropout_rate) >> 16))
    return lax.concatenate(parts, 1)


def rounded(values: jax.Array, dtype: Any) -> jax.Array:
    """values.astype(dtype) of a tile in the accumulators' layout, where it stands.

    What goes round a loop in 16 bits has half of the registers. LLVM would round it after it has gone round.
    """
    if is_interpreted():
        return values.astype(dtype)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(values.shape, dtype, layout=layout)
    kind = _pair_kind(dtype)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def round_pairs(_, array):
        def pair(register):
            i32 = ir.IntegerType.get_signless(32)
            low, high = (llvm.extractelement(register, mgpu.c(i, i32)) for i in range(2))
            return llvm.inline_asm(i32, [high, low], f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f")

        return _of_pairs(array, dtype, lambda place: pair(array.registers[place]))

    return round_pairs(values)  # pyright: ignore[reportCallIssue]: JAX gives the first argument


def _words_of(rows: int, problem: Problem, words: Words, query_axis: int, head: Any, query: Any, key: Any):
    """What gives (word, whether a row has bit 3) of the columns from a multiple of 16 on."""
    masking = problem.masking
    grid = Grid(batch=problem.batch, heads=problem.heads, queries=masking.queries, keys=masking.keys)
    row = grid.row(head, query)
    second = grid.second(words, row)
    steps = [PLACE_STEP * step % _PERIOD for step in ((1, grid.keys) if query_axis else (grid.keys, 1))]
    # All but the constants of each 16 columns, once: the same for both rows of a thread, which are 8 apart.
    shape = (rows, _COLUMNS)
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

    def words_of(column: int) -> tuple[jax.Array, jax.Array]:
        here, next_ = (jnp.uint32(steps[1] * c % _PERIOD) for c in (column, column + 1))
        return shared_word(own + jnp.where(is_odd, next_, here), second), is_other

    return words_of


def _member(is_other_key: Any) -> jax.Array:
    """The multiplier of a key; the condition a Python boolean or an array."""
    return _choose(is_other_key, *(jnp.uint32(member) for member in MEMBERS))


def _of_query(product: jax.Array, is_other: Any) -> jax.Array:
    """The 16 bits of a query, in front; behind them, what decides nothing."""
    return _choose(is_other, product, product << jnp.uint32(16))


def _choose(is_other: Any, own: jax.Array, other: jax.Array) -> jax.Array:
    return (other if is_other else own) if isinstance(is_other, bool) else jnp.where(is_other, other, own)


def _limit(rate: float) -> int:
    """Elements whose lower 31 bits are below it are kept; of these bits, the first 15 decide."""
    return round((1 - rate) * 2**15) << 16


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


def _mask_pairs(products: jax.Array, dtype: Any, limit: int) -> jax.Array:
    """float16's 1.0 or 0.0 by the products' bits, as bits of `dtype`; (64, 8), in the accumulators' layout.

    As in `_as_kept`, the difference from the limit is scaled and saturated.
    """
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(products.shape, dtype, layout=layout)
    scale = 2.0 ** max(0, 26 - (limit >> 10))
    scaled_limit = float(np.uint16(limit).view(np.float16)) * scale
    numbers = [scaled_limit] if scale == 1 else [scaled_limit, -scale]
    difference = "sub.rn.sat.f16x2 $0, $3, random;" if scale == 1 else "fma.rn.sat.f16x2 $0, random, $4, $3;"

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def mask(_, bits):
        i32 = ir.IntegerType.get_signless(32)
        constants = [mgpu.c(int(np.float16(number).view(np.uint16)) * 0x10001, i32) for number in numbers]

        def pair(place):
            # Of both rows the products are one: the first's bits are in front, the other's behind.
            halves = "0x5410" if place[_ROW_AXIS] else "0x7632"
            asm = f"{{ .reg .b32 random; prmt.b32 random, $1, $2, {halves}; abs.f16x2 random, random; {difference} }}"
            low, high = (llvm.extractelement(bits.registers[place], mgpu.c(i, i32)) for i in range(2))
            operands = [low, high, *constants]
            return llvm.inline_asm(i32, operands, asm, "=r" + ",r" * len(operands))

        return _of_pairs(bits, dtype, pair)

    return mask(products)  # pyright: ignore[reportCallIssue]: JAX gives the first argument


def _pair_kind(dtype: Any) -> str:
    return "bf16x2" if dtype == jnp.bfloat16 else "f16x2"


def _of_pairs(like: Any, dtype: Any, pair: Callable[[tuple[int, ...]], Any]) -> Any:
    """An array of Mosaic GPU's with the layout of `like`, of whose registers, each a pair, `pair` has the bits."""
    element = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
    kind = ir.VectorType.get((2,), element)
    registers = np.empty_like(like.registers)
    for place in np.ndindex(*registers.shape):
        registers[place] = llvm.bitcast(kind, pair(place))
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def _uint32(value: Any) -> jax.Array:
    return jnp.asarray(value).astype(jnp.uint32)
