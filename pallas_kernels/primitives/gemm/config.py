"""How a matrix product is cut up: tiles, stages, order, clusters."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """The cut of an (M, N, K) product.

    tile_m, tile_n: rows and columns of the result that a block computes at a time, all accumulators together: with two
        accumulators (a gate and a linear branch) each has tile_n / 2 columns.
    passes: columns of the tiles that a block computes one after the other, beside each other, where they are not all
        tile_n, the most of them; with two accumulators both together, too. All are brought in the width of the widest.
        So that every multiprocessor has as many columns: 14336 are 32 times 256 + 192.
    tile_k: the depth of a step, 16-bit values.
    stages: steps of operands in shared memory at once; fewer where they do not fit.
    warpgroups: that compute; one more brings the operands by TMA.
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
