"""The pairs of a head's columns: their layout in memory and over a warpgroup, and how a kernel reads and writes them.

- Halves (GPT-NeoX, Llama): a pair has one value in each half of a head.
- Words (GPT-J, 16 bits): a pair is two neighbours, read as one word of 32 bits. For XLA the words are the same buffer
  and cost nothing. Reading the members one by one, 2 bytes a thread, took 193 µs where words take 161.
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
from pallas_kernels.primitives.rows import WARP_LANES, WARPS, RowValues, map_row, to_float32

Members = RowValues
"""The first and the second values of pairs."""


@dataclass(frozen=True, kw_only=True)
class HeadTile:
    """A (rows, half) tile of pairs, or of one of their members, with `vector` values per thread and access."""

    rows: int
    half: int
    vector: int

    @classmethod
    def of(cls, size: int, vector: int) -> HeadTile:
        """Returns the tile of a warpgroup, for heads of `size` columns, a power of two."""
        half = size // 2
        vector = min(vector, half // 2)
        return cls(rows=WARPS * WARP_LANES // min(half // vector, WARP_LANES), half=half, vector=vector)

    @property
    def layout(self) -> plgpu.Layout | Any:
        """The layout: each warp has its own rows, and its lanes have the pairs of one or several."""
        rows_a_warp = self.rows // WARPS
        if rows_a_warp == 1:
            tiling = plgpu.Tiling(((WARPS, WARP_LANES * self.vector), (self.vector,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
        tiling = plgpu.Tiling(((self.rows, self.half), (rows_a_warp, self.half), (self.vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


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
    def are_apart(self) -> bool:
        """Whether the members of neighbouring pairs are not neighbours in memory."""
        return self.is_interleaved and not self.are_words

    def view(self, array: jax.Array, size: int) -> jax.Array:
        """Returns the kernel's view, (rows, heads, ...), of an array (rows, columns) with heads of `size` columns."""
        pairs = array.reshape(array.shape[0], -1, *((size // 2, 2) if self.is_interleaved else (2, size // 2)))
        return lax.bitcast_convert_type(pairs, jnp.uint32) if self.are_words else pairs

    def restore(self, view: jax.Array) -> jax.Array:
        """Returns the (rows, columns) array of a view."""
        return (lax.bitcast_convert_type(view, self.dtype) if self.are_words else view).reshape(view.shape[0], -1)

    def load(self, ref: Any, rows: pl.Slice, head: jax.Array | int, tile: HeadTile) -> tuple[jax.Array, ...]:
        """Loads the pairs of one head in their stored form, which takes fewer registers than their `members`."""
        places = self._places(ref.at[rows, head])
        return tuple(plgpu.load(place, layout=tile.layout, optimized=False) for place in places)

    def members(self, loaded: tuple[jax.Array, ...]) -> Members:
        """Returns both members of all pairs, float32."""
        if not self.are_words:
            return to_float32(loaded)
        (word,) = loaded
        halves = (word.astype(jnp.uint16), (word >> jnp.uint32(16)).astype(jnp.uint16))
        return map_row(lambda half: lax.bitcast_convert_type(half, self.dtype).astype(jnp.float32), halves)

    def store(self, ref: Any, rows: pl.Slice, head: jax.Array, members: Members) -> None:
        """Writes the pairs of one head. members: of `dtype`."""
        if self.are_words:
            first, second = (lax.bitcast_convert_type(value, jnp.uint16).astype(jnp.uint32) for value in members)
            members = (first | (second << jnp.uint32(16)),)
        for place, value in zip(self._places(ref.at[rows, head]), members, strict=True):
            compat.store(place, value)

    def _places(self, head: Any) -> list[Any]:
        """Returns the references that a thread reads and writes: of words, or of each member."""
        if self.are_words:
            return [head]
        return [head.at[:, :, m] if self.is_interleaved else head.at[:, m] for m in range(2)]
