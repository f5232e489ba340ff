"""Bias and masks, with a value for each pair of query and key: as XLA prepares them, and as kernels read them."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.masking import Masking

REGISTER = 8
"""Columns of the accumulators' layout over which a thread has one register a row."""
WORD, TILE = 32, 256
"""Bits of a word, and the keys whose words are stored together: a multiple of every tile's."""
_PARTS = 8
"""Parts of the queries, at most, that differ in the keys they see: each may be a kernel."""


def four_axes(array: jax.Array) -> jax.Array:
    """A mask or bias with leading axes of length 1 up to four axes."""
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def whole_rows(array: jax.Array, keys: int) -> jax.Array:
    """`four_axes`, of which the last has so many keys."""
    array = four_axes(array)
    return array if array.shape[3] == keys else jnp.broadcast_to(array, (*array.shape[:3], keys))


def packed_bits(array: jax.Array) -> jax.Array:
    """A boolean array's last axis as bits of uint32: key k is bit k % 32 of word k // 32. Zeros fill the last `TILE`.

    Both passes read an eighth of the bytes that booleans have, and a gradient keeps no more. XLA packs in the fusion
    that computes the mask.
    """
    keys = array.shape[-1]
    array = jnp.pad(array, (*[(0, 0)] * (array.ndim - 1), (0, -keys % TILE)))
    bits = array.reshape(*array.shape[:-1], array.shape[-1] // WORD, WORD).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def seen_bits(array: jax.Array, masking: Masking) -> jax.Array:
    """The bits of a mask, boolean or packed, with zeros for tiles of keys that a band hides from some queries.

    XLA then draws a causal program's random numbers only near what is seen: of 8 x 1024, 12 heads by
    `jax.random.bernoulli`, in 8.1 instead of 13.0 billion operations (counted).
    """
    is_packed = array.dtype == jnp.uint32
    step, words = TILE // WORD if is_packed else TILE, TILE // WORD
    tiles, queries = -(-masking.keys // TILE), array.shape[2]
    rows = -(-queries // (_PARTS * TILE)) * TILE
    if queries <= rows or not masking.has_band:
        return array if is_packed else packed_bits(array)
    parts = []
    for row in range(0, queries, rows):
        first, _, _, last = masking.key_tiles(row, rows, TILE)
        part = array[:, :, row : row + rows, first * step : last * step]
        part = part if is_packed else packed_bits(part)
        parts.append(jnp.pad(part, ((0, 0), (0, 0), (0, 0), (first * words, (tiles - last) * words))))
    return lax.concatenate(parts, 2)


def unpacked_bits(words: jax.Array, keys: int) -> jax.Array:
    """The inverse of `packed_bits`."""
    bits = (words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & jnp.uint32(1)
    return (bits != 0).reshape(*words.shape[:-1], -1)[..., :keys]


def padded(array: jax.Array, rows: int, columns: int) -> jax.Array:
    """Zeros added to the last two axes, up to whole tiles; an axis of length 1 broadcasts."""
    extra = [0 if size == 1 else -size % tile for size, tile in zip(array.shape[2:], (rows, columns), strict=True)]
    return jnp.pad(array, ((0, 0), (0, 0), *((0, e) for e in extra))) if any(extra) else array


def load_bits(
    ref: Any, lead: tuple[Any, Any], starts: tuple[Any, Any], shape: tuple[int, int], query_axis: int = 0
) -> jax.Array:
    """A tile of a mask of `packed_bits`, boolean in the accumulators' layout.

    ref: to (1 or batch, 1 or heads, queries or 1, words), or with queries along axis 1 to (..., words, queries or 1).
    lead: the batch entry and the head. starts: the tile's first places along its axes, of keys a multiple of 64.
    """
    layout = plgpu.Layout.WGMMA
    places = [0 if size == 1 else place for size, place in zip(ref.shape, lead, strict=False)]
    first = lax.div(jnp.asarray(starts[1 - query_axis], jnp.int32), WORD)
    is_one = ref.shape[2 + query_axis] == 1

    def words(index: int, columns: int) -> jax.Array:
        """The words of the tile's queries, of the index-th 32 keys."""
        queries = 0 if is_one else pl.ds(starts[query_axis], shape[query_axis])
        place = (*places, first + index, queries) if query_axis else (*places, queries, first + index)
        if is_one:
            return lax.broadcast(ref[place], (shape[0], columns))
        values = plgpu.load(ref.at[place], layout=layout.reduce(1 - query_axis), optimized=False)
        return lax.broadcast_in_dim(values, (shape[0], columns), (query_axis,))

    if query_axis:
        key = plgpu.broadcasted_iota(jnp.uint32, shape, 0, layout=layout)
        own = jnp.where(key < WORD, words(0, shape[1]), words(1, shape[1]))
        return (own & (jnp.uint32(1) << (key & jnp.uint32(WORD - 1)))) != 0
    # Shifted once for eight columns, which are one register, so that each bit is compared with a constant.
    column = plgpu.broadcasted_iota(jnp.uint32, (shape[0], REGISTER), 1, layout=layout)
    parts = []
    for start in range(0, shape[1], WORD):
        shifted = words(start // WORD, REGISTER) >> column
        parts += [shifted & jnp.uint32(1 << place) for place in range(0, WORD, REGISTER)]
    return lax.concatenate(parts, 1) != 0


def load_bias(ref: Any, lead: tuple[Any, Any], starts: tuple[Any, Any], shape: tuple[int, int]) -> jax.Array:
    """A tile of a bias in the accumulators' layout, broadcast along the array's axes of length 1.

    ref: to (1 or batch, 1 or heads, rows or 1, columns or 1). lead: the batch entry and the head.
    """
    places = [0 if size == 1 else place for size, place in zip(ref.shape, lead, strict=False)]
    axes = [axis for axis in (0, 1) if ref.shape[2 + axis] > 1]
    index = [pl.ds(starts[axis], shape[axis]) if axis in axes else 0 for axis in (0, 1)]
    if not axes:  # of a single query and a single key
        return lax.broadcast(ref[(*places, 0, 0)], shape)
    layout = plgpu.Layout.WGMMA if len(axes) == 2 else plgpu.Layout.WGMMA.reduce(1 - axes[0])
    values = plgpu.load(ref.at[(*places, *index)], layout=layout, optimized=False)
    return values if len(axes) == 2 else lax.broadcast_in_dim(values, shape, tuple(axes))
