"""One launch without its arrays: sizes, the integers' form, and which tiles a block computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.few_rows.weights import widened
from pallas_kernels.primitives.integer_gemm.config import IntegerGemmConfig
from pallas_kernels.primitives.integer_gemm.deal import TALLEST, Deal
from pallas_kernels.primitives.integer_gemm.lanes import widened_lanes
from pallas_kernels.primitives.platform import target_device

Work = Callable[[jax.Array, jax.Array, jax.Array, int], None]
"""Of a tile: its first row and column, the steps before it, and its rows."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """See the module. bits: of an integer. in_lanes: whether integers are in the order of `lanes.py`."""

    m: int
    n: int
    k: int
    bits: int
    in_lanes: bool
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
        if self.in_lanes:
            return widened_lanes(values, self.dtype)
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
    def deal(self) -> Deal | None:
        """How tiles of several heights are dealt out, where the configuration asks for it and it comes out even."""
        return Deal.of(self.m, self.n, self.config, self._most_blocks) if self.config.is_dealt else None

    def for_each_tile(self, work: Work) -> jax.Array:
        """Calls work(row, column, steps before, rows) for each of the block's tiles; the number of all its steps."""
        return self._in_waves(work) if self.deal is None else self._dealt(self.deal, work)

    def _dealt(self, deal: Deal, work: Work) -> jax.Array:
        part = self.config.rows // TALLEST
        before = jnp.int32(0)
        for parts, count, place in deal.turns(lax.axis_index("block")):

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
