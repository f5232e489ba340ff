"""Launch configurations of the kernels, and the sizes for which they are the faster implementation."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from pallas_kernels.ops._products.product import Config
from pallas_kernels.primitives.few_rows.config import MOST_ROWS, choose_few_rows
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.platform import target_device

MOST_PREFERRED_ROWS = 8192
MOST_DIFFERENTIATED_ROWS = 1024
"""The most rows with a gradient: 128 were faster than by XLA, 1706 slower."""
FEWEST_PREFERRED_OUTPUTS, FEWEST_PREFERRED_FEATURES, FEWEST_FEATURES_OF_FEW_ROWS = 1024, 1024, 512
"""The fewest outputs and features that have been measured."""
_SHORT = 1024
"""Up to this number of rows, only small tiles are enough for all multiprocessors."""
_SQUARE = GemmConfig(tile_n=128, tile_k=128, stages=12)
_LOW = replace(_SQUARE, tile_m=104, tile_n=192, warpgroups=3)
"""The tilings up to `_SHORT` rows; the second if its tiles fit in fewer waves."""


def default_config(rows: int, outputs: int, features: int, dtype: jnp.dtype) -> Config:
    """Returns the untuned configuration for a (rows, outputs) result.

    dtype: of the weights' values.
    """
    bits = jnp.iinfo(dtype).bits
    if rows <= MOST_ROWS:
        return choose_few_rows(rows, outputs, features, weight_bits=bits)
    if rows > _SHORT:
        return replace(_SQUARE, tile_m=256, tile_k=512 // bits)

    def work(config: GemmConfig) -> int:
        tiles = -(-rows // config.tile_m) * -(-outputs // config.tile_n)
        return -(-tiles // target_device().core_count) * config.tile_m * config.tile_n

    return min((_SQUARE, _LOW), key=work)


def is_preferred(rows: int, outputs: int, features: int) -> bool:
    """Whether a kernel was measured to be faster than XLA, and so is preferred.

    Speed on an H200 with eight bits and 4096 features, relative to XLA's product of 16-bit weights: 0.98 at 8192 rows;
    at 512 rows 1.00 with 4096 outputs and 1.07 with 14336; 1.6 to 1.8 at 16 rows and at 1. XLA's own product of
    integers widens the weights in a separate pass: 1261 µs at 8192 rows and 14336 outputs, where the kernel takes 1213.
    19 rows, 512 features and 8704 outputs: 1.63.
    """
    least = FEWEST_FEATURES_OF_FEW_ROWS if rows <= MOST_ROWS else FEWEST_PREFERRED_FEATURES
    return rows <= MOST_PREFERRED_ROWS and outputs >= FEWEST_PREFERRED_OUTPUTS and features >= least
