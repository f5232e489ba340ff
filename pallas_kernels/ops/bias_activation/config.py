"""Launch configurations of the bias and activation's kernels: what may be chosen, and what is chosen untuned."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.primitives.elementwise import access_columns

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

    vectors: accesses of 16 bytes a thread and row; a strip is as wide.
    rows: rows that a warpgroup reads at once.
    warpgroups: of a block; they take turns with rows, and their column sums are added in shared memory. Eight leave
        64 registers a thread, enough for a row in hand and the next one under way.
    blocks_per_core: blocks a streaming multiprocessor. Each writes its column sums.
    prefetch: whether a warpgroup reads its next rows before it works on those that it has.
    """

    vectors: int = 1
    rows: int = 1
    warpgroups: int = 8
    blocks_per_core: int = 1
    prefetch: bool = False


def default_elementwise(rows: int, features: int, itemsize: int, *, has_bias: bool) -> ElementwiseConfig:
    """The untuned choice of the forward kernel, and of the backward kernel without a bias."""
    config = ElementwiseConfig(vectors=1, rows=2) if has_bias else ElementwiseConfig(vectors=2, rows=1)
    blocks = rows * features // (config.rows * access_columns(config.vectors, itemsize))
    return config if blocks >= FEW_BLOCKS else ElementwiseConfig(vectors=1, rows=1)


def default_column_sum(rows: int) -> ColumnSumConfig:
    """The untuned choice of the backward kernel with a bias."""
    return ColumnSumConfig() if rows >= 1024 else ColumnSumConfig(warpgroups=1, blocks_per_core=2)


def elementwise_candidates(*, has_bias: bool) -> dict[str, ElementwiseConfig]:
    """The configurations worth measuring, by name."""
    shapes = ((1, 1), (1, 2), (1, 4), (2, 2), (4, 1)) if has_bias else ((1, 1), (2, 1), (4, 1))
    return {f"{v} vectors {r} rows": ElementwiseConfig(vectors=v, rows=r) for v, r in shapes}


def column_sum_candidates() -> dict[str, ColumnSumConfig]:
    """The configurations worth measuring, by name: rows at once, warpgroups a block, blocks a multiprocessor."""
    shapes = ((1, 8, 1, True), (1, 8, 1, False), (2, 8, 1, False), (1, 4, 2, True), (2, 4, 1, True), (1, 2, 4, True))
    return {
        f"{r} rows {w} warpgroups {b} blocks{' prefetch' if p else ''}": ColumnSumConfig(
            rows=r, warpgroups=w, blocks_per_core=b, prefetch=p
        )
        for r, w, b, p in shapes
    }


def rows_at_once(wanted: int, rows: int) -> int:
    """The most rows a block can take at once, up to `wanted`, so that all blocks take as many."""
    while rows % wanted:
        wanted -= 1
    return wanted
