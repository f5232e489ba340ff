"""The problem of one launch: its products, the layout of its operands, and its grid of tiles."""

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
from pallas_kernels.primitives.row_tiles import TileForm, has_whole_groups


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One launch without its arrays.

    widths: columns of the result. If right operands lie side by side, columns of each: each has a result of its own,
        and together they fill one row of tiles.
    accumulators: the number of right operands that are multiplied in one tile, with an accumulator each.
    depths: depth of each pair of a left and a right operand, if pairs follow one another along the depth; else empty.
    has_any_rows: whether tiles begin at any row, and have any number of rows.
    """

    m: int
    widths: tuple[int, ...]
    k: int
    dtype: jnp.dtype
    config: GemmConfig
    accumulators: int = 1
    transpose_a: bool = False
    transpose_b: bool = False
    depths: tuple[int, ...] = ()
    has_any_rows: bool = False

    @property
    def flops(self) -> Products:
        """The FLOPs of the launch, for its metadata."""
        return product(self.m, sum(self.widths), self.k, self.dtype).times(self.accumulators)

    @property
    def columns(self) -> int:
        """Columns of each accumulator in the widest tile."""
        return self.config.tile_n // self.accumulators

    @property
    def strip(self) -> tuple[int, ...]:
        """Columns of each accumulator in each tile of a strip."""
        return tuple(columns // self.accumulators for columns in self.config.strip)

    @property
    def a_block(self) -> tuple[int, int]:
        """The shape of a left operand's tile in memory."""
        rows, depth = self.config.tile_m, self.config.tile_k
        return (depth, rows) if self.transpose_a else (rows, depth)

    @property
    def loaded_rows(self) -> int:
        """Rows of a left operand's tile that TMA loads: only rows that exist, since zeros from outside cost as much.

        The other rows of the buffer are not written. They affect only rows of the result that are not stored.
        """
        return min(self.config.tile_m, -(-self.m // 8) * 8)

    @property
    def in_panels(self) -> bool:
        """Whether tiles of left operands and of the result lie in panels (`row_tiles`)."""
        return self.has_any_rows or not (self.transpose_a or has_whole_groups(self.m))

    @property
    def a_form(self) -> TileForm:
        """Shared-memory layout of a left operand's tiles."""
        return TileForm(size=self.a_block[1], dtype=self.dtype, in_panels=self.in_panels, swizzle=self.swizzle)

    @property
    def b_block(self) -> tuple[int, int]:
        """The shape of a right operand's tile in memory."""
        depth, columns = self.config.tile_k, self.columns
        return (columns, depth) if self.transpose_b else (depth, columns)

    @property
    def swizzle(self) -> int:
        """The swizzle of the operands in bytes; the tensor cores need the same for both."""
        bits = self.dtype.itemsize * 8
        return min(plgpu.find_swizzle(block[1] * bits) for block in (self.a_block, self.b_block))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The first column of each of `widths`, and the one after its last, with each padded to whole strips."""
        strip = sum(self.strip)
        ends = tuple(accumulate(pl.cdiv(width, strip) * strip for width in self.widths))
        return tuple(zip((0, *ends[:-1]), ends, strict=True))

    def owners(self, column: jax.Array) -> Iterator[tuple[jax.Array, int]]:
        """Yields, for each of `widths`, whether the tile at `column` belongs to it, and its first column."""
        for i, (first, last) in enumerate(self.spans):
            is_last = i == len(self.spans) - 1
            yield (column >= first) if is_last else (column >= first) & (column < last), first

    @property
    def grid(self) -> tuple[int, int]:
        """The number of tiles along m, in units of a cluster's, and of strips along n."""
        return pl.cdiv(self.m, self.config.cluster * self.config.tile_m), pl.cdiv(self.spans[-1][1], sum(self.strip))

    @property
    def rows(self) -> int:
        """Rows of the result padded to whole tiles."""
        return self.grid[0] * self.config.cluster * self.config.tile_m

    @property
    def steps(self) -> int:
        """The number of steps of a tile."""
        return self.part_ends[-1]

    @property
    def part_ends(self) -> tuple[int, ...]:
        """The step after the last one of each of `depths`, or of the whole depth."""
        return tuple(accumulate(pl.cdiv(depth, self.config.tile_k) for depth in self.depths or (self.k,)))

    @property
    def squares_shape(self) -> tuple[int, int]:
        """The shape of the rows' sums of squares: one line per tile along n, and rows padded to whole tiles."""
        return self.grid[1] * len(self.strip), self.rows

    def line(self, column: jax.Array) -> jax.Array:
        """Returns the line of that array for the tile that begins at `column`."""
        *starts, strip = accumulate(self.strip)
        lines = lax.div(column, strip) * len(self.strip)
        for start in starts:
            lines += (lax.rem(column, strip) >= start).astype(lines.dtype)
        return lines
