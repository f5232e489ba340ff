"""The tiling of a matrix product, and the untuned choice from sizes alone. TUNING.md has the measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.primitives.hopper import SHARED_BYTES
from pallas_kernels.primitives.platform import target_device

_RESERVED_BYTES = 2048
"""Shared memory for barriers, alignment and Mosaic GPU's own scratch."""
PRODUCER_REGISTERS = 40
"""Registers of each producer thread; the consumers share the rest."""
_REGISTERS = 512
"""Registers of a multiprocessor divided by the threads of one warpgroup."""
_MOST_REGISTERS = 240
"""The most registers of a consumer thread: a multiple of eight below the instruction set's limit of 255."""


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """The tiling of an (M, N, K) product.

    tile_m, tile_n: rows and columns of the result that a block computes at a time. The columns are those of all
        accumulators: with two (a gate and a linear branch), each has tile_n / 2.
    passes: widths of the neighbouring tiles that a block computes in turn, if not all are tile_n wide; tile_n is the
        largest. Two accumulators count together here, too. Every tile is loaded at the largest width. Mixed widths give
        all multiprocessors the same number of columns: 14336 are 32 times 256 + 192.
    tile_k: the depth of a step, in 16-bit values.
    stages: the number of steps whose operands are in shared memory at once; fewer if they do not fit.
    warpgroups: the number of consumer warpgroups. One more, the producer, loads the operands by TMA.
    in_flight: the number of steps whose tensor-core work may be unfinished when the next is issued.
    group: the number of tiles along m before the next one along n; see `plgpu.planar_snake`. Tiles near in time share
        operands in the L2 cache.
    cluster: the number of blocks, 1 or 2, that are neighbours along m and load their common tile of b once, by
        multicast.
    store_columns, store_slots: columns of a stored piece of the result, and buffers of each warpgroup for such pieces.
    even_waves: whether to launch only as many blocks as the number of waves needs. Then no block idles in the last
        wave, and waves are squares of tiles.
    reverses: whether a block computes every other tile from its last step to its first. The L2 cache still has the
        operands of the last steps. Sums are rounded in another order.
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
        """Widths of the tiles in a strip, which a block computes in turn before it takes the next strip."""
        return self.passes or (self.tile_n,)

    @property
    def warpgroup_rows(self) -> int:
        """Rows of the tile that one warpgroup computes."""
        return self.tile_m // self.warpgroups

    @property
    def consumer_registers(self) -> int:
        """Registers of each consumer thread."""
        return min(_MOST_REGISTERS, (_REGISTERS - PRODUCER_REGISTERS) // self.warpgroups // 8 * 8)

    def fitted(
        self,
        *,
        itemsize: int,
        stored_bytes: int,
        products: int = 1,
        other_bytes: int = 0,
        weight_bits: int | None = None,
    ) -> GemmConfig:
        """Returns the configuration with as many stages as fit in shared memory.

        stored_bytes: bytes of one element, summed over all results. products: the number of accumulators.
        other_bytes: of shared memory that the kernel needs besides. weight_bits: of a value of b, if not as of a.
        """
        stage = (self.tile_m * itemsize + self.tile_n * (weight_bits or 8 * itemsize) // 8) * self.tile_k
        width = self.tile_n // products
        columns = min(self.store_columns, width)
        store = self.warpgroups * min(self.store_slots, width // columns) * self.warpgroup_rows * columns * stored_bytes
        left = SHARED_BYTES - _RESERVED_BYTES - store - other_bytes
        return replace(self, stages=max(2, min(self.stages, left // stage)))


FEW_ROWS = 64
"""Up to this number of rows, reading b takes all the time."""
MANY_ROWS = 2048
"""From this number of rows on, pairs of blocks load b's tiles together."""
MIXED = {
    1: GemmConfig(passes=(256, 192)),
    2: GemmConfig(passes=(256, 256, 256, 128), in_flight=0),
}
"""Tilings with mixed widths, by number of accumulators: every block gets as many of 14336 columns at 512 rows."""
MOST_MIXED_ROWS = 512
"""The most rows with mixed widths: with more, they have been counted but not measured."""
NARROW = GemmConfig(tile_n=128, stages=6)
"""For results with too few wide tiles."""
EVEN = GemmConfig(cluster=2, even_waves=True, reverses=True)
"""For many rows: it reads a third less from memory with 4096 features, and a sixth less with 14336."""
_WIDE_TILE = 256
_WIDE_RATE, _NARROW_RATE, _XLA_RATE = 800e6, 660e6, 735e6
"""Operations per microsecond: the kernel's tiles of 256 columns or a single wave, its narrower tiles, and XLA."""
_EPILOGUE_BYTES, _PRODUCT_BYTES, _PASS_BYTES = 1.7e6, 3.2e6, 3.5e6
"""Bytes per microsecond: the kernel's epilogue, operands and XLA's products, and an elementwise pass."""
_LAUNCH_US = 1.5
"""Microseconds that a launch adds."""
WORTH = 0.8
"""The share of the multiprocessors' time that tiles must fill; below, XLA's tilings are faster."""


def choose_config(
    m: int,
    n: int,
    *,
    accumulators: int = 1,
    is_mixed: bool = False,
    is_even: bool = False,
) -> GemmConfig:
    """Chooses the tiling of an (m, n) result; n is the columns of each accumulator. The depth does not matter.

    is_mixed: whether tiles of several widths are allowed. is_even: whether `EVEN` is allowed for many rows.
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
    """Whether tiles of one width keep nearly all multiprocessors busy to the end of an (m, n) result."""
    units = _units(choose_config(m, n, accumulators=accumulators), m, n * accumulators)
    cores = target_device().core_count
    return units / (-(-units // cores) * cores) > WORTH


def estimated_us(
    rows: int,
    outputs: int,
    features: int,
    *,
    products: int = 1,
    read_bytes: int = 0,
    out_bytes: int = 2,
    is_fused: bool = False,
    is_mixed: bool = True,
) -> tuple[float, float]:
    """Estimates the times of products (rows, outputs) on Hopper, by the kernel and by XLA, in microseconds.

    The kernel takes as long as its waves of tiles, or as its bytes. XLA's product takes as long as its operations or
    bytes, whatever its tiles, and what XLA does not fuse is another pass over the product. The rates were set
    by hand from calls on an H200; `xlafuse bench choice` measures whether they choose the faster one.

    products: how many, each with `outputs` columns. read_bytes, out_bytes: of one value of what the epilogue reads, and
    of the result. is_fused: whether XLA's product writes the result. is_mixed: whether few rows may have tiles of
    several widths.
    """
    is_mixed = is_mixed and rows <= MOST_MIXED_ROWS
    config = choose_config(rows, outputs, accumulators=products, is_mixed=is_mixed, is_even=True)
    read_bytes, written_bytes = (rows * outputs * each for each in (read_bytes, out_bytes))
    columns, cores, itemsize = outputs * products, target_device().core_count, 2
    operand_bytes, product_bytes = itemsize * features * (rows + columns), itemsize * rows * columns
    waves = -(-_units(config, rows, columns) // cores)
    computed = waves * cores * config.tile_m * sum(config.strip)
    rate = _WIDE_RATE if config.tile_n >= _WIDE_TILE or waves == 1 else _NARROW_RATE
    moved_us = operand_bytes / _PRODUCT_BYTES + (read_bytes + written_bytes) / _EPILOGUE_BYTES
    kernel_us = _LAUNCH_US + max(2.0 * computed * features / rate, moved_us)

    written = written_bytes + read_bytes if is_fused else product_bytes
    pass_bytes = 0 if is_fused else product_bytes + read_bytes + written_bytes
    xla_bytes = operand_bytes + (products - 1) * itemsize * rows * features + written
    xla_us = max(2.0 * rows * columns * features / _XLA_RATE, xla_bytes / _PRODUCT_BYTES)
    return kernel_us, (products + (not is_fused)) * _LAUNCH_US + xla_us + pass_bytes / _PASS_BYTES


def _few_rows(n: int, accumulators: int) -> GemmConfig:
    """Chooses narrow tiles if the multiprocessors outnumber them, with deep steps and as many stages as fit."""
    columns = 64 if n <= 64 * target_device().core_count or accumulators > 1 else 128
    return GemmConfig(tile_m=64, tile_n=columns * accumulators, tile_k=128, stages=8, warpgroups=1)


def _units(config: GemmConfig, m: int, n: int) -> int:
    """Returns the number of strips of tiles."""
    return -(-m // config.tile_m) * -(-n // sum(config.strip))


def _cost(config: GemmConfig, m: int, n: int) -> float:
    """Estimates the time of all waves, in columns. Narrow tiles cost 6 % more: they load more bytes."""
    waves = -(-_units(config, m, n) // target_device().core_count)
    return waves * sum(config.strip) * (1.0 if config.tile_n >= 256 else 1.06)
