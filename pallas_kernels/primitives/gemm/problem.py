"""One launch without its arrays: sizes, what is multiplied, how operands lie in memory, and how it is cut up."""

from __future__ import annotations

from dataclasses import dataclass

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.primitives.gemm.config import GemmConfig

Product = tuple[int, int, int]
"""The number of the left operand, of the right operand, and of the accumulator."""

ONE: tuple[Product, ...] = ((0, 0, 0),)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """See the module."""

    m: int
    n: int
    k: int
    dtype: jnp.dtype
    products: tuple[Product, ...]
    transpose_a: bool
    transpose_b: bool
    config: GemmConfig

    @property
    def accumulators(self) -> int:
        """Their number."""
        return 1 + max(product[2] for product in self.products)

    @property
    def columns(self) -> int:
        """Columns of each accumulator's tile."""
        return self.config.tile_n // self.accumulators

    @property
    def a_block(self) -> tuple[int, int]:
        """A left operand's tile as it lies in memory."""
        rows, depth = self.config.tile_m, self.config.tile_k
        return (depth, rows) if self.transpose_a else (rows, depth)

    @property
    def brought_rows(self) -> int:
        """Rows of a left operand's tile that TMA brings: no more than there are, since zeros from outside cost as much.

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
    def clusters(self) -> tuple[int, int]:
        """Blocks of a cluster along m and n."""
        return (2 if self.config.cluster == "m" else 1, 2 if self.config.cluster == "n" else 1)

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster, for whichever reason."""
        return self.clusters[0] * self.clusters[1] * self.config.splits

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along m and n, in units of a cluster's."""
        rows, columns = self.clusters
        return pl.cdiv(self.m, rows * self.config.tile_m), pl.cdiv(self.n, columns * self.columns)

    @property
    def steps(self) -> int:
        """Of a tile, or of a block's share of its depth."""
        return pl.cdiv(pl.cdiv(self.k, self.config.tile_k), self.config.splits)

    @property
    def width(self) -> int:
        """Columns of each accumulator of one warpgroup."""
        return self.config.warpgroup_columns // self.accumulators

    @property
    def partial_shape(self) -> tuple[int, int, int, int]:
        """Of the array in which the sums of split depths meet: split, accumulator, row, column."""
        rows, columns = self.grid
        return self.config.splits, self.accumulators, rows * self.config.tile_m, columns * self.columns
