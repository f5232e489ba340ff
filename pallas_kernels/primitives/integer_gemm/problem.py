"""The sizes of one launch with integer weights, and the assignment of tiles to blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.few_rows.weights import widened
from pallas_kernels.primitives.integer_gemm.config import IntegerGemmConfig
from pallas_kernels.primitives.integer_gemm.packing import widened_packed
from pallas_kernels.primitives.platform import target_device

PARTS = 8
"""Of the rows."""
TALLEST = 4
"""Parts of the tallest tile."""

Place = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""From the number of a block's tile to its column, in tiles, and its first part."""


@dataclass(frozen=True, kw_only=True)
class WorkSplit:
    """Tiles of three heights, assigned so that all blocks have about as many rows.

    Of 512 rows and 14336 columns, tiles of 256 x 128 are 224: 132 blocks take two turns, and in the second one 40 of
    them have none. Here the rows are eight parts of 64. Some columns have them as 4 + 4, the others as 3 + 3 + 2, and a
    block has tiles of 4 + 3 parts, 4 + 2, or 2 + 2 + 2: at most seven, where two turns are eight. 79.0 µs instead of
    84.4 (llama3-8b, int8).

    With C columns of tiles and P blocks, all tiles assigned:
        4 + 4 have 3 (P - C) columns, 3 + 3 + 2 have 4 C - 3 P;
        4 + 2 have 12 P - 14 C blocks, 4 + 3 have 8 C - 6 P, 2 + 2 + 2 have 6 C - 5 P.

    columns: of tiles. blocks: that take them; those of 4 + 2 first, then of 4 + 3, then of 2 + 2 + 2."""

    columns: int
    blocks: int

    @classmethod
    def of(cls, rows: int, outputs: int, config: IntegerGemmConfig, blocks: int) -> WorkSplit | None:
        """That of a (rows, outputs) result, or None where rows are not eight parts or a tile finds no block."""
        split = cls(columns=-(-outputs // (config.cluster * config.columns)), blocks=blocks)
        parts = -(-rows // (config.rows // TALLEST))
        return split if parts == PARTS and split.is_even else None

    @property
    def is_even(self) -> bool:
        """Whether each tile finds a block: from 5/6 to 6/7 as many columns as blocks."""
        return 5 * self.blocks <= 6 * self.columns and 7 * self.columns <= 6 * self.blocks

    def turns(self, block: jax.Array) -> Iterator[tuple[int, jax.Array, Place]]:
        """For each height, in parts: how many tiles of it the block has, and where they are."""
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
"""Of a tile: its first row and column, the steps before it, and its rows."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One launch without its arrays.

    bits: of an integer. is_packed: whether integers are in the order of `packing.py`.
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
        """Tiles along rows and columns, these in units of a cluster's."""
        return pl.cdiv(self.m, self.config.rows), pl.cdiv(self.n, self.config.cluster * self.config.columns)

    @property
    def steps(self) -> int:
        """Of a tile."""
        return pl.cdiv(self.k, self.config.depth)

    def left(self, values: jax.Array) -> jax.Array:
        """The operand in registers that is made of integers."""
        if self.is_packed:
            return widened_packed(values, self.dtype)
        return widened(plgpu.layout_cast(values, plgpu.Layout.WGMMA), self.dtype)

    @property
    def blocks(self) -> int:
        """That run, each on a multiprocessor; or clusters of them."""
        return max(1, min(self._most_blocks, self.grid[0] * self.grid[1]))

    @property
    def _most_blocks(self) -> int:
        return target_device().core_count // self.config.cluster

    @property
    def low_tiles(self) -> int:
        """The last tiles, which `config.last_rows` cuts into lower ones; 0 where those would be too many."""
        left = self.grid[0] * self.grid[1] % self.blocks
        return left if self.config.last_rows and left * self.config.rows <= self.blocks * self.config.last_rows else 0

    @property
    def work_split(self) -> WorkSplit | None:
        """How tiles of several heights are assigned, where the configuration asks for it and it comes out even."""
        return WorkSplit.of(self.m, self.n, self.config, self._most_blocks) if self.config.has_work_split else None

    def for_each_tile(self, work: Work) -> jax.Array:
        """Calls work(row, column, steps before, rows) for each of the block's tiles; the number of all its steps."""
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
        """The block's column of tiles, of a cluster's."""
        if self.config.cluster == 1:
            return tile
        return self.config.cluster * tile + lax.axis_index("cluster")
