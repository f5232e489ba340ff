"""The untuned choice of a cut, from sizes alone. TUNING.md has the measurements behind it."""

from __future__ import annotations

from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.platform import target_device

FEW_ROWS = 64
"""Up to here reading b is all that takes time."""
MANY_ROWS = 2048
"""From here on pairs of blocks bring b's tiles together."""
WORTH = 0.8
"""Of the multiprocessors' time, below which XLA's other cuts are the better ones."""


def choose_config(m: int, n: int, *, accumulators: int = 1) -> GemmConfig:
    """The cut of an (m, n) result with so many accumulators of n columns each; the depth does not matter."""
    if m <= FEW_ROWS:
        return _few_rows(n, accumulators)
    wide = GemmConfig(cluster="m" if m >= MANY_ROWS else None)
    if accumulators > 1:
        return wide
    square = GemmConfig(tile_n=128, stages=6)
    return min((wide, square), key=lambda config: _cost(config, m, n))


def fills(m: int, n: int, *, accumulators: int = 1) -> bool:
    """Whether the chosen tiles of an (m, n) result keep nearly all multiprocessors busy to the end."""
    config = choose_config(m, n, accumulators=accumulators)
    tiles = _tiles(config, m, n * accumulators)
    cores = target_device().core_count
    return tiles / (-(-tiles // cores) * cores) > WORTH


def _few_rows(n: int, accumulators: int) -> GemmConfig:
    """Narrow tiles as long as they do not outnumber the multiprocessors; deep steps, as many under way as fit."""
    columns = 64 if n <= 64 * target_device().core_count or accumulators > 1 else 128
    return GemmConfig(tile_m=64, tile_n=columns * accumulators, tile_k=128, stages=8, warpgroups=1)


def _tiles(config: GemmConfig, m: int, n: int) -> int:
    return -(-m // config.tile_m) * -(-n // config.tile_n)


def _cost(config: GemmConfig, m: int, n: int) -> float:
    """Of the waves of tiles, in units of a tile's area; smaller tiles bring more bytes for the same work."""
    tiles = _tiles(config, m, n)
    area = config.tile_m * config.tile_n
    return -(-tiles // target_device().core_count) * area * (1.0 if area >= 128 * 256 else 1.06)
