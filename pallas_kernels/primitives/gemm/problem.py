"""The sizes of one launch: what is multiplied, how operands lie in memory, and how tiles are counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.flop_metadata import Products, product
from pallas_kernels.primitives.gemm.config import GemmConfig

Product = tuple[int, int, int]
"""The number of the left operand, of the right operand, and of the accumulator."""

ONE: tuple[Product, ...] = ((0, 0, 0),)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One launch without its arrays.

    widths: columns of each right operand where those lie beside each other, so that their products are results of their
        own that fill one row of tiles; else the result's columns.
    depths: of each pair of a left and a right operand, where pairs follow one another along the depth; else none.
    """

    m: int
    widths: tuple[int, ...]
    k: int
    dtype: jnp.dtype
    products: tuple[Product, ...]
    transpose_a: bool
    transpose_b: bool
    config: GemmConfig
    depths: tuple[int, ...] = ()

    @property
    def accumulators(self) -> int:
        """Number of accumulators."""
        return 1 + max(product[2] for product in self.products)

    @property
    def flops(self) -> Products:
        """The FLOPs of the launch, for its metadata."""
        return product(self.m, sum(self.widths), self.k, self.dtype).times(len(self.products))

    @property
    def columns(self) -> int:
        """Columns of each accumulator's tile, the widest."""
        return self.config.tile_n // self.accumulators

    @property
    def strip(self) -> tuple[int, ...]:
        """Columns of each accumulator in the tiles beside each other that are taken together."""
        return tuple(columns // self.accumulators for columns in self.config.strip)

    @property
    def a_block(self) -> tuple[int, int]:
        """A left operand's tile as it lies in memory."""
        rows, depth = self.config.tile_m, self.config.tile_k
        return (depth, rows) if self.transpose_a else (rows, depth)

    @property
    def loaded_rows(self) -> int:
        """Rows of a left operand's tile that TMA loads: no more than there are, since zeros from outside cost as much.

        The others keep what was there; they only reach rows of the result that are not stored.
        """
        return min(self.config.tile_m, -(-self.m // 8) * 8)

    @property
    def b_block(self) -> tuple[int, int]:
        """A right operand's tile as it lies in memory."""
        depth, columns = self.config.tile_k, self.columns
        return (columns, depth) if self.transpose_b else (depth, columns)

    @property
    def swizzle(self) -> int:
        """Bytes over which operands are swizzled; the tensor cores want the same of both."""
        bits = self.dtype.itemsize * 8
        return min(plgpu.find_swizzle(block[1] * bits) for block in (self.a_block, self.b_block))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Of each of `widths`, the first column and the one after the last, when each is filled up to whole strips."""
        strip = sum(self.strip)
        ends = tuple(accumulate(pl.cdiv(width, strip) * strip for width in self.widths))
        return tuple(zip((0, *ends[:-1]), ends, strict=True))

    def owners(self, column: jax.Array) -> Iterator[tuple[jax.Array, int]]:
        """For each of `widths`, whether the tile that begins there belongs to it, and its first column."""
        for i, (first, last) in enumerate(self.spans):
            is_last = i == len(self.spans) - 1
            yield (column >= first) if is_last else (column >= first) & (column < last), first

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along m, in units of a cluster's, and strips of them along n."""
        return pl.cdiv(self.m, self.config.cluster * self.config.tile_m), pl.cdiv(self.spans[-1][1], sum(self.strip))

    @property
    def rows(self) -> int:
        """Of the result, when it is filled up to whole tiles."""
        return self.grid[0] * self.config.cluster * self.config.tile_m

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.part_ends[-1]

    @property
    def part_ends(self) -> tuple[int, ...]:
        """For each of `depths`, or for the whole depth, the step after its last."""
        return tuple(accumulate(pl.cdiv(depth, self.config.tile_k) for depth in self.depths or (self.k,)))

    @property
    def squares_shape(self) -> tuple[int, int]:
        """Of the array of rows' sums of squares: a line for the columns of each warpgroup, whole tiles of rows."""
        return self.grid[1] * len(self.strip), self.rows

    def line(self, column: jax.Array) -> jax.Array:
        """The line of that array for the columns of a warpgroup that begin there."""
        *starts, strip = accumulate(self.strip)
        lines = lax.div(column, strip) * len(self.strip)
        for start in starts:
            lines += (lax.rem(column, strip) >= start).astype(lines.dtype)
        return lines
