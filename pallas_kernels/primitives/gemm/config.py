"""The tiling of a matrix product, and the untuned choice from sizes alone. TUNING.md has the measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.primitives.platform import target_device

SHARED_BYTES = 227 * 1024
"""Shared memory that one block may have on Hopper."""
_RESERVED_BYTES = 2048
"""For barriers, alignment and Mosaic GPU's own scratch."""
PRODUCER_REGISTERS = 40
"""Of each thread of the producer; the consumers share the rest."""
_REGISTERS = 512
"""Registers of a streaming multiprocessor over the threads of one warpgroup."""
_MOST_REGISTERS = 240
"""Of a computing thread; 255 is the instruction set's limit, and the number must be a multiple of eight."""


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """The tiling of an (M, N, K) product.

    tile_m, tile_n: rows and columns of the result that a block computes at a time, all accumulators together: with two
        accumulators (a gate and a linear branch) each has tile_n / 2 columns.
    passes: columns of the tiles that a block computes one after the other, beside each other, where they are not all
        tile_n, the most of them; with two accumulators both together, too. All are loaded in the width of the widest.
        So that every multiprocessor has as many columns: 14336 are 32 times 256 + 192.
    tile_k: the depth of a step, 16-bit values.
    stages: steps of operands in shared memory at once; fewer where they do not fit.
    warpgroups: that compute; one more, the producer, loads the operands by TMA.
    in_flight: steps of tensor-core work that may be unfinished when the next is issued.
    group: tiles along m that follow one another before the next along n; see `plgpu.planar_snake`. Tiles near in time
        share operands in the L2 cache.
    cluster: blocks, 1 or 2, that are neighbours along m and load their common tile of b once, by multicast.
    store_columns, store_slots: the result leaves in pieces of so many columns, through so many buffers a warpgroup.
    even_waves: no more blocks than the number of waves needs, so that none waits in the last one, and waves are whole
        squares of tiles.
    reverses: every other tile of a block is gone through from its last step to its first, since the L2 cache still has
        the last steps' operands. Sums are rounded in another order.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    warpgroups: int = 2
    in_flight: int = 1
    group: int = 8
    cluster: int = 1
    store_columns: int = 64
    store_slots: int = 2
    passes: tuple[int, ...] = ()
    even_waves: bool = False
    reverses: bool = False

    @property
    def strip(self) -> tuple[int, ...]:
        """Columns of the tiles that a block computes one after the other before it takes the next place."""
        return self.passes or (self.tile_n,)

    @property
    def warpgroup_rows(self) -> int:
        """Rows of the tile that one warpgroup computes."""
        return self.tile_m // self.warpgroups

    @property
    def consumer_registers(self) -> int:
        """Registers of each computing thread."""
        return min(_MOST_REGISTERS, (_REGISTERS - PRODUCER_REGISTERS) // self.warpgroups // 8 * 8)

    def fitted(self, *, itemsize: int, operands: tuple[int, int], products: int, stored_bytes: int) -> GemmConfig:
        """The same with as many stages as fit.

        operands: how many left and right arrays there are. products: the accumulators' number. stored_bytes: of one
        element in all results that leave through shared memory.
        """
        rows, columns = operands[0] * self.tile_m, operands[1] * self.tile_n // products
        stage = (rows + columns) * self.tile_k * itemsize
        width = self.tile_n // products
        columns = min(self.store_columns, width)
        store = self.warpgroups * min(self.store_slots, width // columns) * self.warpgroup_rows * columns * stored_bytes
        left = SHARED_BYTES - _RESERVED_BYTES - store
        return replace(self, stages=max(2, min(self.stages, left // stage)))


FEW_ROWS = 64
"""Up to here the time is that of reading b."""
MANY_ROWS = 2048
"""From here on pairs of blocks load b's tiles together."""
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
"""Share of the multiprocessors' time that tiles must fill; below, XLA's tilings are faster."""


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
    """Of the waves of units, in columns; smaller tiles load more bytes for the same work."""
    waves = -(-_units(config, m, n) // target_device().core_count)
    return waves * sum(config.strip) * (1.0 if config.tile_n >= 256 else 1.06)
