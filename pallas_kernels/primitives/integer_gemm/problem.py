"""The problem of one launch with integer weights, and the assignment of its tiles to blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.few_rows.weights import widened
from pallas_kernels.primitives.gemm.operands import SWIZZLE_BYTES
from pallas_kernels.primitives.integer_gemm.config import GROUP, IntegerGemmConfig
from pallas_kernels.primitives.integer_gemm.packing import widened_packed
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.row_tiles import TileForm

PARTS = 8
"""The number of parts of the rows in a work split."""
TALLEST = 4
"""Parts of the tallest tile."""

Place = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""Returns the column, in tiles, and the first part of the n-th tile of a block."""


@dataclass(frozen=True, kw_only=True)
class WorkSplit:
    """An assignment of tiles of three heights in which all blocks have about as many rows.

    512 rows and 14336 columns make 224 tiles of 256 x 128. 132 blocks need two turns for them, and 40 blocks are idle
    in the second one. The work split divides the rows into eight parts of 64 instead. Some columns are cut into tiles
    of 4 + 4 parts, the others into 3 + 3 + 2. A block gets tiles of 4 + 3, 4 + 2 or 2 + 2 + 2 parts: at most seven
    parts, where two turns are eight. This takes 79.0 µs instead of 84.4 (llama3-8b, int8).

    With C columns of tiles and P blocks:
        3 (P - C) columns are cut into 4 + 4, and 4 C - 3 P into 3 + 3 + 2;
        12 P - 14 C blocks get 4 + 2, 8 C - 6 P get 4 + 3, and 6 C - 5 P get 2 + 2 + 2.

    columns: the number of columns of tiles.
    blocks: the number of blocks. Those with 4 + 2 parts come first, then those with 4 + 3, then those with 2 + 2 + 2.
    """

    columns: int
    blocks: int

    @classmethod
    def of(cls, rows: int, outputs: int, config: IntegerGemmConfig, blocks: int) -> WorkSplit | None:
        """Returns the split of a (rows, outputs) result, or None if the rows are not eight parts or it is not even."""
        split = cls(columns=-(-outputs // (config.cluster * config.columns)), blocks=blocks)
        parts = -(-rows // (config.rows // TALLEST))
        return split if parts == PARTS and split.is_even else None

    @property
    def is_even(self) -> bool:
        """Whether every tile gets a block: the columns must be 5/6 to 6/7 of the blocks."""
        return 5 * self.blocks <= 6 * self.columns and 7 * self.columns <= 6 * self.blocks

    def turns(self, block: jax.Array) -> Iterator[tuple[int, jax.Array, Place]]:
        """Yields, for each height in parts, how many such tiles the block has, and their places."""
        halved = 3 * (self.blocks - self.columns)
        short = 12 * self.blocks - 14 * self.columns
        tall = 2 * halved

        def four(_):
            return lax.div(block, 2), 4 * lax.rem(block, 2)

        def three(_):
            tile = block - short
            return halved + lax.div(tile, 2), 3 * lax.rem(tile, 2)

        def two(n):
            return halved + jnp.where(block < short, block, short + 3 * (block - tall) + n), jnp.int32(6)

        yield 4, (block < tall).astype(jnp.int32), four
        yield 3, ((block >= short) & (block < tall)).astype(jnp.int32), three
        yield 2, jnp.where(block < short, 1, jnp.where(block >= tall, 3, 0)), two


Work = Callable[[jax.Array, jax.Array, jax.Array, int], None]
"""Called with a tile's first row and column, the steps of the block's earlier tiles, and the tile's rows."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One launch without its arrays.

    bits: bits of a weight. is_packed: whether the weights are packed, see `packing.py`.
    """

    m: int
    n: int
    k: int
    bits: int
    is_packed: bool
    dtype: jnp.dtype
    config: IntegerGemmConfig

    @property
    def grid(self) -> tuple[int, int]:
        """The number of tiles along the rows, and along the columns in units of a cluster's."""
        return pl.cdiv(self.m, self.config.rows), pl.cdiv(self.n, self.config.cluster * self.config.columns)

    @property
    def x_form(self) -> TileForm:
        """Shared-memory layout of x's tiles."""
        return TileForm.of(self.m, size=self.config.depth, dtype=self.dtype, swizzle=SWIZZLE_BYTES)

    def result_form(self, dtype: jnp.dtype) -> TileForm:
        """Shared-memory layout of a piece of the result or residual."""
        return TileForm.of(self.m, size=GROUP, dtype=dtype)

    @property
    def steps(self) -> int:
        """The number of steps of a tile."""
        return pl.cdiv(self.k, self.config.depth)

    def left(self, values: jax.Array) -> jax.Array:
        """Widens integers in registers to the product's left operand."""
        if self.is_packed:
            return widened_packed(values, self.dtype)
        return widened(plgpu.layout_cast(values, plgpu.Layout.WGMMA), self.dtype)

    @property
    def blocks(self) -> int:
        """The number of persistent blocks, or clusters: one block per multiprocessor, but no more than tiles."""
        return max(1, min(self._most_blocks, self.grid[0] * self.grid[1]))

    @property
    def _most_blocks(self) -> int:
        return target_device().core_count // self.config.cluster

    @property
    def low_tiles(self) -> int:
        """How many of the last tiles are cut into tiles of `config.last_rows`; 0 if those would be too many."""
        left = self.grid[0] * self.grid[1] % self.blocks
        return left if self.config.last_rows and left * self.config.rows <= self.blocks * self.config.last_rows else 0

    @property
    def work_split(self) -> WorkSplit | None:
        """The work split, if the configuration asks for it and it is even; else None."""
        return WorkSplit.of(self.m, self.n, self.config, self._most_blocks) if self.config.has_work_split else None

    def for_each_tile(self, work: Work) -> jax.Array:
        """Calls `work(row, column, before, rows)` for each tile of the block; returns the block's number of steps."""
        return self._in_waves(work) if self.work_split is None else self._in_split(self.work_split, work)

    def _in_split(self, split: WorkSplit, work: Work) -> jax.Array:
        part = self.config.rows // TALLEST
        before = jnp.int32(0)
        for parts, count, place in split.turns(lax.axis_index("block")):

            def tile(n, before, parts=parts, place=place):
                column, first = place(n)
                work(first * part, self._own(column) * self.config.columns, before, parts * part)
                return before + self.steps

            before = lax.fori_loop(0, count, tile, before)
        return before

    def _in_waves(self, work: Work) -> jax.Array:
        config, (rows, columns) = self.config, self.grid
        high_tiles = rows * columns - self.low_tiles

        def place(number):
            i, j = plgpu.planar_snake(number, (rows, columns), 0, min(config.group, rows))
            j = self._own(j)
            return i * config.rows, j * config.columns

        @plgpu.nd_loop((high_tiles,), collective_axes="block", init_carry=jnp.int32(0))
        def steps(info, carry):
            work(*place(info.index[0]), carry, config.rows)
            return carry + self.steps

        if not self.low_tiles:
            return steps  # pyright: ignore[reportReturnType]: the decorator gives the last carry
        block, pieces = lax.axis_index("block"), config.rows // config.last_rows
        has_one = block < self.low_tiles * pieces

        @pl.when(has_one)
        def _():
            row, column = place(high_tiles + lax.div(block, pieces))
            work(row + lax.rem(block, pieces) * config.last_rows, column, steps, config.last_rows)  # pyright: ignore[reportArgumentType]: likewise

        return steps + jnp.where(has_one, self.steps, 0)  # pyright: ignore[reportOperatorIssue]: likewise

    def _own(self, tile: jax.Array) -> jax.Array:
        """Returns the block's own column of tiles among those of its cluster."""
        if self.config.cluster == 1:
            return tile
        return self.config.cluster * tile + lax.axis_index("cluster")
