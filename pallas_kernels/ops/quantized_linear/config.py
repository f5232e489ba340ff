"""Launch configurations of the kernels, and where they are the faster implementation."""

from __future__ import annotations

from pallas_kernels.primitives.few_rows.choice import MOST_ROWS, choose_few_rows
from pallas_kernels.primitives.few_rows.config import FewRowsConfig
from pallas_kernels.primitives.integer_gemm.config import IntegerGemmConfig

Config = FewRowsConfig | IntegerGemmConfig
_LINE_BITS = 512
"""Of a row of weights that come at once for products of many rows."""
MOST_PREFERRED_ROWS = 8192
FEWEST_OUTPUTS, FEWEST_FEATURES = 1024, 1024
"""Above, and below these, nothing has been measured."""
_SHORT = 1024
"""Rows up to which square tiles are needed for every multiprocessor to have one."""


def default_config(rows: int, outputs: int, features: int, *, bits: int) -> Config:
    """The untuned choice for a (rows, outputs) result with sums over so many features."""
    if rows <= MOST_ROWS:
        return choose_few_rows(rows, outputs, features, weight_bits=bits)
    depth = _LINE_BITS // bits
    if rows <= _SHORT:
        return IntegerGemmConfig(rows=128, depth=depth, stages=12)
    return IntegerGemmConfig(depth=depth)


def candidates(rows: int, *, bits: int) -> dict[str, Config]:
    """The configurations worth measuring, by name."""
    if rows > MOST_ROWS:
        depths = {8: (64, 128), 4: (128, 256)}[bits]
        return {
            f"{m} rows, {depth} deep": IntegerGemmConfig(rows=m, depth=depth, stages=12)
            for m in (128, 256)
            for depth in depths
        }
    depth = {8: 128, 4: 256}[bits]
    return {
        f"{columns} columns, depth {depth} shared by {splits}, {warpgroups} warpgroups": FewRowsConfig(
            columns=columns, depth=depth, splits=splits, warpgroups=warpgroups, stages=64
        )
        for columns, splits, warpgroups in ((64, 1, 2), (64, 1, 4), (64, 2, 2), (64, 2, 4), (128, 1, 4))
    }


def is_preferred(rows: int, outputs: int, features: int) -> bool:
    """Whether a kernel runs where the caller leaves the choice: where it was measured to be faster.

    On an H200 with int8, times as fast as XLA, which widens the weights in a pass of its own: 1.4 at 512 rows of 4096
    features and outputs, 1.01 at 8192. Few rows: no slower than XLA's product of 16-bit weights at any size measured.
    """
    return rows <= MOST_PREFERRED_ROWS and outputs >= FEWEST_OUTPUTS and features >= FEWEST_FEATURES
