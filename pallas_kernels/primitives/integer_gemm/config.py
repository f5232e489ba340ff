"""The tiling of a product with integer weights, and the problem of one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.primitives.gemm.operands import SWIZZLE_BYTES
from pallas_kernels.primitives.hopper import SHARED_BYTES
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.row_tiles import TileForm
from pallas_kernels.primitives.transposed import GROUP

_RESERVED_BYTES = 2048
"""Shared memory for barriers, alignment and Mosaic GPU's own scratch."""
PIECE = 64
"""Rows of a stored piece of the result. Pieces of 32 rows spill with tiles of 256."""
_STRIP = 8
"""Tiles along the rows before the next columns; tiles near in time share operands in the L2 cache."""


@dataclass(frozen=True, kw_only=True)
class IntegerGemmConfig:
    """The tiling of an (M, K) x (K, N) product; a block computes `rows` x `columns` of the result at a time.

    rows: rows of a tile, at most 256. They are columns of the tensor cores' transposed product.
    warpgroups: the number of consumer warpgroups, two or three; one more loads the operands.
    depth: the depth of a step, a multiple of 64.
    stages: the number of steps whose operands are in shared memory at once; fewer if they do not fit.
    """

    rows: int = 128
    warpgroups: int = 2
    depth: int = 128
    stages: int = 12

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return GROUP * self.warpgroups

    @property
    def slots(self) -> int:
        """Buffers of each warpgroup for stored pieces: two, if the pieces of a tile come in pairs."""
        return 1 + (pl.cdiv(self.rows, PIECE) % 2 == 0)

    def fitted(self, *, weight_bits: int, itemsize: int, out_itemsize: int) -> IntegerGemmConfig:
        """Returns the configuration with as many stages as fit in shared memory."""
        stage = self.depth * (self.columns * weight_bits // 8 + self.rows * itemsize)
        left = SHARED_BYTES - _RESERVED_BYTES - self.slots * self.columns * PIECE * out_itemsize
        return replace(self, stages=max(2, min(self.stages, left // stage)))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One launch without its arrays. integers: the weights' dtype."""

    m: int
    n: int
    k: int
    integers: jnp.dtype
    dtype: jnp.dtype
    config: IntegerGemmConfig

    @property
    def grid(self) -> tuple[int, int]:
        """The number of tiles along the rows and along the columns."""
        return pl.cdiv(self.m, self.config.rows), pl.cdiv(self.n, self.config.columns)

    @property
    def blocks(self) -> int:
        """The number of persistent blocks: one per multiprocessor, but no more than tiles."""
        return max(1, min(target_device().core_count, self.grid[0] * self.grid[1]))

    @property
    def steps(self) -> int:
        """The number of steps of a tile."""
        return pl.cdiv(self.k, self.config.depth)

    @property
    def x_form(self) -> TileForm:
        """Shared-memory layout of x's tiles."""
        return TileForm.of(self.m, size=self.config.depth, dtype=self.dtype, swizzle=SWIZZLE_BYTES)

    def result_form(self, dtype: jnp.dtype) -> TileForm:
        """Shared-memory layout of a piece of the result or residual."""
        return TileForm.of(self.m, size=GROUP, dtype=dtype)

    def for_each_tile(self, work: Callable[[jax.Array, jax.Array, jax.Array], None]) -> jax.Array:
        """Calls `work(row, column, steps of earlier tiles)` for each tile of the block; returns all its steps."""
        rows, columns = self.grid

        @plgpu.nd_loop((rows * columns,), collective_axes="block", init_carry=jnp.int32(0))
        def steps(info, carry):
            i, j = plgpu.planar_snake(info.index[0], (rows, columns), 0, min(_STRIP, rows))
            work(i * self.config.rows, j * self.config.columns, carry)
            return carry + self.steps

        return steps  # pyright: ignore[reportReturnType]: the decorator gives the last carry
