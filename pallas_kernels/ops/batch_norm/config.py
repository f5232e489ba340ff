"""Launch configurations of batch normalisation's kernels: what may be chosen, and what is chosen untuned."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.primitives.elementwise import access_columns

FEW_BLOCKS = 1024
"""Below about this many blocks a GPU is not full, and smaller blocks end sooner."""


@dataclass(frozen=True, kw_only=True)
class BatchNormConfig:
    """How both kernels cut their work: the one that reduces, and the one that applies what was found.

    rows, warpgroups, blocks_per_core: of the reducing kernel, whose blocks are persistent: rows that a warpgroup reads
        at once, warpgroups of a block, blocks a streaming multiprocessor.
    apply_rows: rows that a block of one warpgroup takes in the applying kernel; the columns' numbers are read once for
        them.
    """

    rows: int = 4
    warpgroups: int = 8
    blocks_per_core: int = 1
    apply_rows: int = 4


def default_config(rows: int, features: int, itemsize: int, *, arrays: int = 1) -> BatchNormConfig:
    """The untuned choice for a reduction over so many arrays: forward one, backward two."""
    if rows < 1024:
        return BatchNormConfig(rows=1, warpgroups=1, blocks_per_core=2, apply_rows=1)
    blocks = rows * features // (4 * access_columns(1, itemsize))
    return BatchNormConfig(rows=4 // arrays, apply_rows=4 if blocks >= FEW_BLOCKS else 1)


def candidates() -> dict[str, BatchNormConfig]:
    """The configurations worth measuring, by name, in both phases."""
    shapes = ((2, 8, 4), (4, 8, 4), (4, 8, 2), (4, 8, 8), (4, 4, 4))
    return {
        f"{r} rows {w} warpgroups, {a} rows": BatchNormConfig(rows=r, warpgroups=w, apply_rows=a) for r, w, a in shapes
    }
