"""Launch configurations of the kernels, and the sizes for which they are the faster implementation."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from pallas_kernels.primitives.few_rows.config import MOST_ROWS, FewRowsConfig, choose_few_rows
from pallas_kernels.primitives.integer_gemm.config import IntegerGemmConfig
from pallas_kernels.primitives.integer_gemm.mma_kernel import COLUMNS, IntegerMmaConfig
from pallas_kernels.primitives.integer_gemm.packing import is_packed_dtype
from pallas_kernels.primitives.integer_gemm.problem import WorkSplit
from pallas_kernels.primitives.platform import target_device

Config = FewRowsConfig | IntegerMmaConfig | IntegerGemmConfig
_LINE_BITS = 512
"""Bits of a row of weights in one step, for products of many rows."""
MOST_PREFERRED_ROWS = 8192
MOST_DIFFERENTIATED_ROWS = 1024
"""The most rows with a gradient: 128 were faster than by XLA, 1706 slower."""
FEWEST_OUTPUTS, FEWEST_FEATURES, FEWEST_FEATURES_OF_FEW_ROWS = 1024, 1024, 512
"""The fewest outputs and features that have been measured."""
_SHORT = 1024
"""Up to this number of rows, only small tiles are enough for all multiprocessors."""
_SQUARE = IntegerGemmConfig(rows=128, depth=128, in_parts=True, stages=12)
_LOW = IntegerGemmConfig(rows=104, warpgroups=3, depth=128, in_parts=True, stages=12, store_rows=32)
"""The tilings for packed weights and up to `_SHORT` rows; the second if its tiles fit in fewer waves."""
_WORK_SPLIT = IntegerGemmConfig(in_parts=True, has_work_split=True, store_rows=32)
"""The tiling for an even work split, as of 512 rows and 14336 outputs. Small pieces leave room for another stage."""
_MANY_ROWS, _MANY_WAVES = 4096, 16
_PAIRED = IntegerGemmConfig(cluster=2, last_rows=64)
_PAIRED_LONG = replace(_PAIRED, group=4, store_rows=128)
"""The tilings for packed weights and more than `_MANY_ROWS` rows; the second above `_MANY_WAVES` waves of tiles."""
_MMA = IntegerMmaConfig()
_MMA_FEATURES = range(2048, 8192)
_BLOCKS = (0.9, 2.0)
"""Its fewest and most blocks per multiprocessor. For more than one row, only twice the fewest was measured."""


def default_config(rows: int, outputs: int, features: int, dtype: jnp.dtype, *, scale_groups: int = 1) -> Config:
    """Returns the untuned configuration for a (rows, outputs) result.

    dtype: of the weights' values.
    """
    bits, is_packed = jnp.iinfo(dtype).bits, is_packed_dtype(dtype)
    if rows <= MOST_ROWS:
        if is_packed and scale_groups == 1 and _takes_mma(rows, outputs, features):
            return _MMA
        return choose_few_rows(rows, outputs, features, weight_bits=bits, is_packed=is_packed)
    if rows > _SHORT:
        if not is_packed or rows <= _MANY_ROWS:
            return IntegerGemmConfig(depth=_LINE_BITS // bits)
        tiles = -(-rows // _PAIRED.rows) * -(-outputs // _PAIRED.columns)
        return _PAIRED_LONG if tiles > _MANY_WAVES * target_device().core_count else _PAIRED
    if bits < 8:
        return IntegerGemmConfig(rows=128, depth=_LINE_BITS // bits, stages=12)
    if is_packed and WorkSplit.of(rows, outputs, _WORK_SPLIT, target_device().core_count) is not None:
        return _WORK_SPLIT

    def work(config: IntegerGemmConfig) -> int:
        tiles = -(-rows // config.rows) * -(-outputs // config.columns)
        return -(-tiles // target_device().core_count) * config.rows * config.columns

    return min((_SQUARE, _LOW), key=work) if is_packed else _SQUARE


def _takes_mma(rows: int, outputs: int, features: int) -> bool:
    if not _MMA.fits(rows, outputs, features) or features not in _MMA_FEATURES:
        return False
    least, most = (share * target_device().core_count for share in _BLOCKS)
    return (least if rows == 1 else 2 * least) <= outputs // COLUMNS <= most


def is_preferred(rows: int, outputs: int, features: int) -> bool:
    """Whether a kernel was measured to be faster than XLA, and so is preferred.

    Speed on an H200 with eight bits and 4096 features, relative to XLA's product of 16-bit weights: 1.00 and 1.01 at
    8192 rows; at 512 rows 1.00 with 4096 outputs and 1.13 with 14336; 1.7 to 1.8 at 16 rows and at 1. XLA's own product
    of integers widens the weights in a separate pass. 19 rows, 512 features and 8704 outputs: 1.63.
    """
    least = FEWEST_FEATURES_OF_FEW_ROWS if rows <= MOST_ROWS else FEWEST_FEATURES
    return rows <= MOST_PREFERRED_ROWS and outputs >= FEWEST_OUTPUTS and features >= least
