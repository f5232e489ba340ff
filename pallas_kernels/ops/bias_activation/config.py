"""Launch configurations of the bias and activation's kernels: what may be chosen, and what is chosen untuned.

The kernels run for any shape of at least 128 features, and for fewer where 2**n rows together have 128 (2**n divides
the number of rows); without a bias for any array of at least 128 values; everything else is "xla".
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.primitives.elementwise import access_columns
from pallas_kernels.primitives.rows import ACCESS_BYTES

FEW_BLOCKS = 1024
"""Below about this many blocks a GPU is not full, and smaller blocks end sooner."""


@dataclass(frozen=True, kw_only=True)
class ElementwiseConfig:
    """What a block of one warpgroup takes: `vectors` accesses of 16 bytes a thread, of each of `rows` rows.

    The bias is read once for those rows. Without one there is only one long row.
    """

    vectors: int = 1
    rows: int = 2


@dataclass(frozen=True, kw_only=True)
class ColumnSumConfig:
    """How the backward kernel with a bias cuts its work: persistent blocks, each for one strip of columns.

    vectors: accesses of a thread and row; a strip is as wide. access_bytes: of an access.
    rows: rows that a warpgroup reads at once.
    warpgroups: of a block; they take turns with rows, and their column sums are added in shared memory. Eight leave
        64 registers a thread, enough for a row in hand and the next one under way.
    blocks_per_core: blocks a streaming multiprocessor. Each writes its column sums, which a second kernel adds. 0: one
        block a strip, whose sums are the gradient, and no second kernel.
    prefetch: whether a warpgroup reads its next rows before it works on those that it has.
    """

    vectors: int = 1
    access_bytes: int = ACCESS_BYTES
    rows: int = 1
    warpgroups: int = 8
    blocks_per_core: int = 1
    prefetch: bool = False

    def columns(self, itemsize: int) -> int:
        """Of a strip, in values of `itemsize` bytes."""
        return access_columns(self.vectors, itemsize) * self.access_bytes // ACCESS_BYTES


def default_elementwise(rows: int, features: int, itemsize: int, *, has_bias: bool) -> ElementwiseConfig:
    """The untuned choice of the forward kernel, and of the backward kernel without a bias."""
    config = ElementwiseConfig(vectors=1, rows=2) if has_bias else ElementwiseConfig(vectors=2, rows=1)
    blocks = rows * features // (config.rows * access_columns(config.vectors, itemsize))
    return config if blocks >= FEW_BLOCKS else ElementwiseConfig(vectors=1, rows=1)


FEW_ROWS = 64
"""Up to so many rows one block a strip is enough."""


def default_column_sum(rows: int, itemsize: int) -> ColumnSumConfig:
    """The untuned choice of the backward kernel with a bias."""
    if rows <= FEW_ROWS:
        return _few_rows(rows, itemsize)
    if rows < 1024:
        return ColumnSumConfig(warpgroups=1, blocks_per_core=2)
    return ColumnSumConfig(prefetch=itemsize == 2)  # reading ahead is not measured for float32


def _few_rows(rows: int, itemsize: int, access_bytes: int = 2) -> ColumnSumConfig:
    warpgroups = next(n for n in (1, 2, 4, 8) if n == 8 or 8 * n >= rows)
    return ColumnSumConfig(
        access_bytes=max(access_bytes, itemsize),
        rows=8,
        warpgroups=warpgroups,
        blocks_per_core=0,
    )


def elementwise_candidates(*, has_bias: bool) -> dict[str, ElementwiseConfig]:
    """The configurations worth measuring, by name."""
    shapes = ((1, 1), (1, 2), (1, 4), (2, 2), (4, 1)) if has_bias else ((1, 1), (2, 1), (4, 1))
    return {f"{v} vectors {r} rows": ElementwiseConfig(vectors=v, rows=r) for v, r in shapes}


def column_sum_candidates(rows: int, itemsize: int) -> dict[str, ColumnSumConfig]:
    """The configurations worth measuring, by name: accesses a row, rows at once, warpgroups a block."""
    if rows <= FEW_ROWS:
        two_kernels = {"two kernels": ColumnSumConfig(warpgroups=1, blocks_per_core=2)}
        return {f"{b} bytes": _few_rows(rows, itemsize, b) for b in (2, 4, 8)} | two_kernels
    shapes = ((1, 1, 8, False), (1, 1, 8, True), (1, 2, 8, False), (1, 2, 4, True), (2, 1, 4, True))
    return {
        f"{v} vectors {r} rows {w} warpgroups{' prefetch' if p else ''}": ColumnSumConfig(
            vectors=v, rows=r, warpgroups=w, prefetch=p
        )
        for v, r, w, p in shapes
    }
