"""Which weights dropout keeps: the same in every kernel and in the reference, however the work is cut.

The 16 weights whose queries are alike but for bit 3 (of value 8), and whose keys are but for bits 0, 3 and 4, share a
random word. For the keys with bit 4 its halves change places. It is multiplied by four numbers, one for each query and
each value of the keys' bit 3; an even key and the odd one behind it have 16 bits of a product each. In the
accumulators' layout one thread holds all 16 where queries lie along its rows, and two neighbours are one register once
they are rounded to 16 bits, as their bits are. Where queries lie along columns, a thread holds four of them, and makes
the word for these alone. What is left to an element is done on floats, as integers are compared at half their rate: on
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
"""Of the layout's array of registers: the two rows of a thread."""

Members = tuple[int, int]
"""What a word is multiplied by, for a thread's first row and for the other one."""


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
        i32 = ir.IntegerType.get_signless(32)
        registers = np.empty_like(array.registers)
        for place in np.ndindex(*registers.shape):
            low, high = (llvm.extractelement(array.registers[place], mgpu.c(i, i32)) for i in range(2))
            pair = llvm.inline_asm(i32, [high, low], f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f")
            registers[place] = llvm.bitcast(_pair_type(dtype), pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)

    return round_pairs(values)  # pyright: ignore[reportCallIssue]: JAX gives the first argument


def saturated(value: jax.Array) -> jax.Array:
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


def bits_of_halves(word: jax.Array, members: Members) -> jax.Array:
    """Halves of products in front, (64, 8) uint32: of even columns the one behind, of odd ones that in front."""

    def register_of(product):
        i32 = ir.IntegerType.get_signless(32)
        even = arith.shli(product, mgpu.c(16, i32))
        return vector.from_elements(ir.VectorType.get((2,), i32), [even, product])

    return _of_products(word, members, jnp.uint32, register_of)


def mask_of_halves(word: jax.Array, members: Members, dtype: Any, limit: int) -> jax.Array:
    """float16's 1.0 or 0.0 as bits of `dtype`, (64, 8): 1.0 where 15 bits of the products' halves are below the limit.

    Their difference, as float16, is scaled such that the least one is 1, and saturated.
    """
    scale = 2.0 ** max(0, 26 - (limit >> 10))
    scaled_limit = float(np.uint16(limit).view(np.float16)) * scale
    numbers = [scaled_limit] if scale == 1 else [scaled_limit, -scale]
    difference = "sub.rn.sat.f16x2 $0, $2, random;" if scale == 1 else "fma.rn.sat.f16x2 $0, random, $3, $2;"
    asm = f"{{ .reg .b32 random; abs.f16x2 random, $1; {difference} }}"

    def register_of(product):
        i32 = ir.IntegerType.get_signless(32)
        constants = [mgpu.c(int(np.float16(number).view(np.uint16)) * 0x10001, i32) for number in numbers]
        operands = [product, *constants]
        return llvm.bitcast(_pair_type(dtype), llvm.inline_asm(i32, operands, asm, "=r" + ",r" * len(operands)))

    return _of_products(word, members, dtype, register_of)


def permuted(word: jax.Array, order: jax.Array) -> jax.Array:
    """The bytes of 64 x 8 words in another order, that of `prmt` with zeros behind the word.

    Both are the same for a thread's two rows, and order for all that it has: so they are made once.
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


def _of_products(word: jax.Array, members: Members, dtype: Any, register_of: Callable[[Any], Any]) -> jax.Array:
    """An array like `word`, of which a thread's elements are one number, made once: the compiler may not see that.

    register_of: from its product with the member of a row to the row's two elements.
    """
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(word.shape, dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def make(_, words):
        i32 = ir.IntegerType.get_signless(32)
        own = llvm.extractelement(words.registers.flat[0], mgpu.c(0, i32))
        registers = np.empty_like(words.registers)
        for place in np.ndindex(*registers.shape):
            registers[place] = register_of(arith.muli(own, mgpu.c(members[place[_ROW_AXIS]], i32)))
        is_signed = False if dtype == jnp.uint32 else None
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=is_signed)

    return make(word)  # pyright: ignore[reportCallIssue]: JAX gives the first argument


def _pair_kind(dtype: Any) -> str:
    return "bf16x2" if dtype == jnp.bfloat16 else "f16x2"


def _pair_type(dtype: Any) -> Any:
    return ir.VectorType.get((2,), ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get())


_PERIOD = 2**32
_HALF, _OTHER, _FAR = 1, 8, 16
"""The bits in which the places of those that share a word differ: all three of keys, the second of queries."""
_KEY_BITS = _HALF | _OTHER | _FAR
_KEYS = 2 * _FAR
"""Among so many, those that share words are."""
_COLUMNS = 8
"""Columns of a register of the accumulators' layout."""
_PACKED_LIMITS = 0x2C00, 0x7C00
"""From where on a float16 has a scale that makes its least difference 1, and the first that is no finite number."""
_WHOLE_QUERIES = 128


class Grid:
    """The places of words: rows for (batch, head, query), columns for keys."""

    def __init__(self, *, batch: int, heads: int, queries: int, keys: int, period: int = _PERIOD):
        self.queries = -(-queries // _WHOLE_QUERIES) * _WHOLE_QUERIES
        self.keys = -(-keys // _KEYS) * _KEYS
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
    """combine(values, kept), in a kernel: kept is 1.0 where `keep_mask` is true, else 0.0.

    Args:
        values: a tile in the accumulators' layout, its lengths multiples of 16 queries and 32 keys.
        combine: of some of the tile's columns.
        words: of `mixed_words`.
        query_axis: the axis along which queries lie.
        head: of the queries, that of all batches counted on.
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
    columns lie in one register, and so do the random bits of the two, which are a product.
    """
    words_of = _words_of(64, problem, words, 0, head, query, key)
    parts = []
    for column in range(0, columns, _COLUMNS):
        word, members = words_of(column), _members_at(column)
        if is_interpreted():
            kept = _are_kept(_bits_of_rows(word, members), problem.dropout_rate)
            parts.append(jnp.where(kept, jnp.float32(packed_unit(problem) or 0), jnp.float32(0)).astype(problem.dtype))
        else:
            parts.append(mask_of_halves(word, members, problem.dtype, _limit(problem.dropout_rate) >> 16))
    return lax.concatenate(parts, 1)


def _words_of(rows: int, problem: Problem, words: Words, query_axis: int, head: Any, query: Any, key: Any):
    """What gives the words of eight columns from one on: of 8 keys, or of 8 queries and those 8 further on.

    Halves are where they belong; where keys lie along rows, also those of even keys are in front.
    """
    masking = problem.masking
    grid = Grid(batch=problem.batch, heads=problem.heads, queries=masking.queries, keys=masking.keys)
    row = grid.row(head, query)
    second = grid.second(words, row)
    steps = [PLACE_STEP * step % _PERIOD for step in ((1, grid.keys) if query_axis else (grid.keys, 1))]
    # All but the constants of the columns, once: the same for both rows of a thread, which are 8 apart.
    first_axis, second_axis = (_places(rows, axis) for axis in (0, 1))
    # A kernel's loop goes along the second axis: all else is one number held throughout. Only `moving` is multiplied as
    # a scalar: uniform registers are few, and descriptors of products that do not fit in them are spilled.
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
        # The same for a thread's two rows.
        return _of_key(word, first_axis) if is_interpreted() else permuted(word, order)

    return words_of


def _places(rows: int, axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.uint32, (rows, _COLUMNS), axis, layout=plgpu.Layout.WGMMA)


def _of_key(word: jax.Array, key: jax.Array) -> jax.Array:
    """The word with what belongs to a key in front: a permutation of bytes."""
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
    """What the words of eight keys from a multiple of 8 on are multiplied by; even keys' 16 bits are behind."""
    own, other = (keys[_has(column, _OTHER)] for keys in MEMBERS)
    return own, other


def _bits_of_rows(word: jax.Array, members: Members) -> jax.Array:
    """The 16 bits of each of 64 x 8 weights, in front; behind them, what decides nothing."""
    if is_interpreted():
        product = word * jnp.where(_has(_places(64, 0), _OTHER), *map(jnp.uint32, members[::-1]))
        return jnp.where(_has(_places(64, 1), _HALF), product, product << jnp.uint32(16))

    return bits_of_halves(word, members)


def _has(place: Any, bit: int) -> Any:
    return (place & bit) != 0


def _without(place: jax.Array, bits: int) -> jax.Array:
    return place & jnp.uint32(_PERIOD - 1 - bits)


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
    return saturated(float(np.uint32(limit).view(np.float32)) * scale - scaled)


def _uint32(value: Any) -> jax.Array:
    return jnp.asarray(value).astype(jnp.uint32)
