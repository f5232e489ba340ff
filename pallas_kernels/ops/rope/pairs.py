"""The pairs of query and key: their layout in memory and over a warpgroup, and how a kernel reads and writes them.

The kernel runs for head sizes that are powers of two from 16 on, where a token's query heads, and its key heads, fill
the 128 threads of a warpgroup: multiples of 4 for head sizes from 64 on, of 8 for 32 and of 16 for 16.

- Halves (GPT-NeoX, Llama): a pair has one value in each half of a head, and either member is read in 16 bytes a thread.
- Words (GPT-J, 16 bits): a pair is two neighbours, read as one word of 32 bits, four of them in 16 bytes. For XLA the
  words are the same buffer and cost nothing. Reading the members one by one, 2 bytes a thread, took 193 µs where this
  takes as long as halves.
- Neighbours (GPT-J, 32 bits): a pair is two neighbours, whose members are read one by one, 4 bytes a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import compat
from pallas_kernels.primitives.rows import ACCESS_BYTES, WARPS

WARP_LANES = 32

Members = tuple[jax.Array, jax.Array]
"""The first and the second values of pairs, float32."""


@dataclass(frozen=True, kw_only=True)
class HeadTile:
    """A (heads, half) tile of pairs, or of one of their members, with `vector` values per thread and access."""

    heads: int
    half: int
    vector: int

    @property
    def layout(self) -> plgpu.Layout | Any:
        """The layout: each warp has its own heads, and its lanes have the pairs of one or several heads."""
        heads_a_warp = self.heads // WARPS
        lanes = WARP_LANES // heads_a_warp
        if heads_a_warp == 1:
            tiling = plgpu.Tiling(((WARPS, lanes * self.vector), (self.vector,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
        tiling = plgpu.Tiling(((self.heads, self.half), (heads_a_warp, self.half), (self.vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def head_tile(heads: int, half: int, itemsize: int, *, access_bytes: int = ACCESS_BYTES) -> HeadTile | None:
    """Returns the tile with the widest accesses that divides `heads` heads, or None.

    `itemsize` is that of a member of a pair, or of a pair if both members are read as one word.
    """
    vector = max(1, access_bytes // itemsize)
    while vector:
        if half % vector == 0:
            lanes = min(half // vector, WARP_LANES)
            heads_a_tile = WARPS * WARP_LANES // lanes
            if WARP_LANES % lanes == 0 and half % (lanes * vector) == 0 and heads % heads_a_tile == 0:
                return HeadTile(heads=heads_a_tile, half=half, vector=vector)
        vector //= 2
    return None


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs of values of `dtype`: neighbours, or one value from each half of a head."""

    dtype: Any
    is_interleaved: bool

    @property
    def are_words(self) -> bool:
        """Whether a pair is read as one word, whose lower half is the first member."""
        return self.is_interleaved and jnp.dtype(self.dtype).itemsize == 2

    @property
    def unit_bytes(self) -> int:
        """Bytes of an element of the kernel's view."""
        return 4 if self.are_words else jnp.dtype(self.dtype).itemsize

    @property
    def widest_access(self) -> int:
        """The most bytes that a thread can read in one access."""
        return self.unit_bytes if self.is_interleaved and not self.are_words else ACCESS_BYTES

    def view(self, array: jax.Array, tokens: int) -> jax.Array:
        """Returns the kernel's view, (tokens, heads, ...), of an array (batch, length, heads, head size)."""
        pairs = array.reshape(tokens, array.shape[2], *((-1, 2) if self.is_interleaved else (2, -1)))
        return lax.bitcast_convert_type(pairs, jnp.uint32) if self.are_words else pairs

    def restore(self, view: jax.Array, like: jax.Array) -> jax.Array:
        """Returns the array of a view."""
        return (lax.bitcast_convert_type(view, like.dtype) if self.are_words else view).reshape(like.shape)

    def load(self, ref, token: jax.Array, heads: pl.Slice, tile: HeadTile) -> tuple[jax.Array, ...]:
        """Loads the pairs of some heads in their stored form, which takes fewer registers than their `members`."""
        places = self._places(token, heads)
        return tuple(plgpu.load(ref.at[place], layout=tile.layout, optimized=False) for place in places)

    def members(self, loaded: tuple[jax.Array, ...]) -> Members:
        """Returns both members of all pairs."""
        if not self.are_words:
            first, second = loaded
            return first.astype(jnp.float32), second.astype(jnp.float32)
        (word,) = loaded
        if self.dtype == jnp.bfloat16:  # the upper half of a float32
            upper = (word << jnp.uint32(16), word & jnp.uint32(0xFFFF0000))
            first, second = (lax.bitcast_convert_type(value, jnp.float32) for value in upper)
            return first, second
        lower = (word.astype(jnp.uint16), (word >> jnp.uint32(16)).astype(jnp.uint16))
        first, second = (lax.bitcast_convert_type(value, self.dtype).astype(jnp.float32) for value in lower)
        return first, second

    def store(self, ref, token: jax.Array, heads: pl.Slice, members: Members) -> None:
        """Rounds and writes the pairs of some heads."""
        if self.are_words:
            bits = (lax.bitcast_convert_type(value.astype(self.dtype), jnp.uint16) for value in members)
            first, second = (value.astype(jnp.uint32) for value in bits)
            compat.store(ref.at[token, heads], first | (second << jnp.uint32(16)))
            return
        for place, value in zip(self._places(token, heads), members, strict=True):
            compat.store(ref.at[place], value.astype(self.dtype))

    def _places(self, token: jax.Array, heads: pl.Slice) -> list[tuple[Any, ...]]:
        """Returns the indices that a thread reads and writes: of words, or of each member."""
        if self.are_words:
            return [(token, heads)]
        return [(token, heads, slice(None), m) if self.is_interleaved else (token, heads, m) for m in range(2)]
