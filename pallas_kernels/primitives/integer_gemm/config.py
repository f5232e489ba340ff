"""The tiling of a product with integer weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.primitives.gemm.config import SHARED_BYTES

_RESERVED_BYTES = 2048
"""Shared memory for barriers, alignment and Mosaic GPU's own scratch."""
GROUP = 64
"""Columns of the result that a warpgroup computes. They are rows of the tensor cores' transposed product."""


@dataclass(frozen=True, kw_only=True)
class IntegerGemmConfig:
    """The tiling of an (M, K) x (K, N) product; a block computes `rows` x `columns` of the result at a time.

    rows: rows of a tile, at most 256. They are columns of the tensor cores' transposed product.
    warpgroups: the number of consumer warpgroups, two or three; one more loads the operands.
    depth: the depth of a step.
    stages: the number of steps whose operands are in shared memory at once; fewer if they do not fit.
    in_parts: whether a step is widened in parts of 64, at least two, while the tensor cores multiply the part before.
    last_rows: the height of the last tiles, if the last wave would leave blocks idle and no block then gets more than
        one such tile; 0: all tiles have the same height.
    has_work_split: whether tiles of `rows`, three quarters of `rows` and half of `rows` are assigned so that all blocks
        have about as many rows. It needs a result of twice `rows`, and columns that divide evenly; see
        `problem.WorkSplit`.
    cluster: the number of blocks, 1 or 2, that are neighbours along the columns and load x's tile once, by multicast.
    group: the number of tiles along the rows before the next columns.
    store_rows, store_slots: rows of a stored piece of the result, and buffers of each warpgroup for such pieces.
    """

    rows: int = 256
    warpgroups: int = 2
    depth: int = 64
    stages: int = 6
    in_parts: bool = False
    last_rows: int = 0
    has_work_split: bool = False
    cluster: int = 1
    group: int = 8
    store_rows: int = 64
    store_slots: int = 2

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return GROUP * self.warpgroups

    def fitted(self, *, weight_bits: int, itemsize: int, out_itemsize: int) -> IntegerGemmConfig:
        """Returns the configuration with as many stages as fit in shared memory."""
        slots = min(self.store_slots, self.rows // self.store_rows)
        stage = self.depth * (self.columns * weight_bits // 8 + self.rows * itemsize)
        left = SHARED_BYTES - _RESERVED_BYTES - self.columns * self.store_rows * slots * out_itemsize
        return replace(self, store_slots=slots, stages=max(2, min(self.stages, left // stage)))
