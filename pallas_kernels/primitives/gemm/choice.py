"""The untuned choice of a cut, from sizes alone."""

from __future__ import annotations

from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.platform import target_device

FEW_ROWS = 64
"""Up to here reading b is all that takes time."""


def choose_config(m: int, n: int, k: int, *, accumulators: int = 1) -> GemmConfig:
    """The cut of an (m, n, k) product with so many accumulators of n columns each."""
    del k
    if m <= FEW_ROWS:
        return GemmConfig(tile_m=64, tile_n=32 * accumulators, tile_k=128, warpgroups=1, stages=8, store_columns=32)
    wide, square = GemmConfig(), GemmConfig(tile_n=128, stages=6)
    return min((wide, square), key=lambda config: _cost(config, m, n * accumulators))


def _cost(config: GemmConfig, m: int, n: int) -> float:
    """Of the waves of tiles, in units of a tile's area; smaller tiles bring more bytes for the same work."""
    cores = target_device().core_count
    tiles = -(-m // config.tile_m) * -(-n // config.tile_n)
    penalty = 1.0 if config.tile_m * config.tile_n >= 128 * 256 else 1.06
    return -(-tiles // cores) * config.tile_m * config.tile_n * penalty
