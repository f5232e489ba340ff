"""The tiling of a product with integer weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.primitives.gemm.config import SHARED_BYTES

_RESERVED_BYTES = 2048
"""For barriers, alignment and Mosaic GPU's own scratch."""
GROUP = 64
"""Columns of the result that a warpgroup computes: the product is made transposed."""


@dataclass(frozen=True, kw_only=True)
class IntegerGemmConfig:
    """The tiling of an (M, K) x (K, N) product; a block computes `rows` x `columns` of the result at a time.

    rows: of x, at most 256: columns of the transposed product that the tensor cores make.
    warpgroups: that compute, two or three; one more loads the operands.
    depth: of a step.
    stages: steps of operands in shared memory at once; fewer where they do not fit.
    in_parts: whether a step is widened in parts of 64, each while the tensor cores have the part before. At least two.
    last_rows: tiles that would leave blocks idle at the end are cut into lower ones, of so many rows, if no block then
        has more than one; 0: they are not.
    has_work_split: whether tiles of `rows`, three quarters of them and half of them are assigned so that blocks have as
        many rows; where the result's are twice `rows`, and columns come out even: see `problem.WorkSplit`.
    cluster: blocks, 1 or 2, that are neighbours along the columns and load x's tile once, by multicast.
    group: tiles along the rows that follow one another, before the next columns.
    store_rows, store_slots: the result leaves in pieces of so many rows, through so many buffers a warpgroup.
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
        """Of a tile."""
        return GROUP * self.warpgroups

    def fitted(self, *, weight_bits: int, itemsize: int, out_itemsize: int) -> IntegerGemmConfig:
        """The same with as many stages as fit."""
        slots = min(self.store_slots, self.rows // self.store_rows)
        stage = self.depth * (self.columns * weight_bits // 8 + self.rows * itemsize)
        left = SHARED_BYTES - _RESERVED_BYTES - self.columns * self.store_rows * slots * out_itemsize
        return replace(self, store_slots=slots, stages=max(2, min(self.stages, left // stage)))
