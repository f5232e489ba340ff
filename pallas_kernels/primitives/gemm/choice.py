"""The untuned choice of a cut, from sizes alone. TUNING.md has the measurements behind it."""

from __future__ import annotations

from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.platform import target_device

FEW_ROWS = 64
"""Up to here reading b is all that takes time."""
MANY_ROWS = 2048
"""From here on pairs of blocks bring b's tiles together."""
MIXED = {
    1: GemmConfig(passes=(256, 192)),
    2: GemmConfig(passes=(256, 256, 256, 128), in_flight=0),
}
"""For 512 rows and 14336 columns of each accumulator, by their number: as many columns for every block."""
MOST_MIXED_ROWS = 512
"""With more rows, plain and gated products by tiles of several widths have been counted, but not measured."""
NARROW = GemmConfig(tile_n=128, stages=6)
"""Where wide tiles are too few."""
EVEN = GemmConfig(cluster=2, even_waves=True, reverses=True)
"""For many rows: with 4096 features it reads a third less from memory, with 14336 a sixth less."""
WORTH = 0.8
"""Of the multiprocessors' time, below which XLA's other cuts are the better ones."""


def choose_config(
    m: int,
    n: int,
    *,
    accumulators: int = 1,
    is_mixed: bool = False,
    is_even: bool = False,
) -> GemmConfig:
    """The cut of an (m, n) result with so many accumulators of n columns each; the depth does not matter.

    is_mixed: whether tiles of several widths are allowed. is_even: whether waves of many rows may be even, and every
    other tile computed from its last step to its first.
    """
    if m <= FEW_ROWS:
        return _few_rows(n, accumulators)
    wide = GemmConfig(cluster=2 if m >= MANY_ROWS else 1)
    configs = [wide] if accumulators > 1 else [wide, NARROW]
    if is_mixed and m < MANY_ROWS:
        configs.append(MIXED[accumulators])
    config = min(configs, key=lambda config: _cost(config, m, n * accumulators))
    return EVEN if is_even and m >= MANY_ROWS and config == wide else config


def fills(m: int, n: int, *, accumulators: int = 1) -> bool:
    """Whether tiles of an (m, n) result, all of one width, keep nearly all multiprocessors busy to the end."""
    units = _units(choose_config(m, n, accumulators=accumulators), m, n * accumulators)
    cores = target_device().core_count
    return units / (-(-units // cores) * cores) > WORTH


def _few_rows(n: int, accumulators: int) -> GemmConfig:
    """Narrow tiles as long as they do not outnumber the multiprocessors; deep steps, as many under way as fit."""
    columns = 64 if n <= 64 * target_device().core_count or accumulators > 1 else 128
    return GemmConfig(tile_m=64, tile_n=columns * accumulators, tile_k=128, stages=8, warpgroups=1)


def _units(config: GemmConfig, m: int, n: int) -> int:
    """Places that blocks take one after the other: tiles, or strips of them."""
    return -(-m // config.tile_m) * -(-n // sum(config.strip))


def _cost(config: GemmConfig, m: int, n: int) -> float:
    """Of the waves of units, in columns; smaller tiles bring more bytes for the same work."""
    waves = -(-_units(config, m, n) // target_device().core_count)
    return waves * sum(config.strip) * (1.0 if config.tile_n >= 256 else 1.06)
