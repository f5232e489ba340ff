"""Launch configurations of the norms: their parameters and the untuned defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pallas_kernels.primitives.rows import ACCESS_BYTES, THREADS, WARPS, short_rows_at_once, split_warp_row

SHARED_MEMORY_BYTES = 228 * 1024
"""Shared memory of a streaming multiprocessor of Hopper."""
BLOCK_RESERVED_BYTES = 1024
"""Shared memory that the driver reserves for each block."""
IN_FLIGHT_BYTES = 36 * 1024
"""Bytes of x and dy to have in flight to a multiprocessor while each of its blocks reads a row."""
LONGEST_ROW = 16384
"""The longest row that the forward pass holds in registers as float32: 206 a thread in bf16."""
LONGEST_WHOLE_ROW = 8192
"""The longest row whose backward pass fits in the registers of one warpgroup."""
MOST_READ_AHEAD = 122 * 1024
"""The most bytes of a row in float32, of its values as stored, and of scale and bias that registers hold together."""


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """How the backward kernel splits its work: persistent blocks, each of which takes every n-th row.

    loads: "registers": a warp reads whole short rows; "ring": TMA brings rows to a ring of `steps` stages in shared
        memory, and `warpgroups` share each row. Several need rows that divide evenly.
    blocks_per_core: blocks per streaming multiprocessor. Each writes one row of partial column sums.
    keeps_row: whether a row stays in registers as float32 between its two passes ("ring" only). Else the second pass
        reads it again from shared memory, which saves registers.
    """

    loads: Literal["registers", "ring"] = "ring"
    blocks_per_core: int = 3
    warpgroups: int = 1
    steps: int = 3
    keeps_row: bool = False

    def parts(self, features: int, itemsize: int) -> tuple[int, ...]:
        """Returns the shape in which a block sees a row: (warpgroups, warps, columns), or the row as it is.

        Sums of lines take one barrier of the block, and sums over a warpgroup two for each kind.
        """
        is_even = features % (THREADS * ACCESS_BYTES // itemsize) == 0
        if self.loads == "registers" or (self.warpgroups == 1 and not is_even):
            return (features,)
        return (self.warpgroups, WARPS, features // (self.warpgroups * WARPS))


@dataclass(frozen=True, kw_only=True)
class BackwardShape:
    """The properties of a call that decide its backward configuration.

    streams: arrays read row by row (x, dy, and the sum's cotangent if there is one).
    gain_bytes: bytes of one value of the scale; 0 without a scale.
    sums: gradients summed over columns (scale, bias).
    has_dropout: whether the kernel also writes the gradient of the dropout's input.
    centered: whether the mean is subtracted from rows.
    """

    rows: int
    features: int
    itemsize: int
    streams: int
    gain_bytes: int
    sums: int = 1
    has_dropout: bool = False
    centered: bool = False

    def ring(self, *, warpgroups: int, blocks_per_core: int, most_steps: int = 4) -> BackwardConfig | None:
        """Returns a configuration with a ring of as many rows as fit, up to `most_steps`.

        Returns None if fewer than 2 rows fit, if the row would spill, or if it does not divide over several warpgroups
        or into TMA's accesses.
        """
        columns = self.features // (warpgroups * THREADS)  # per thread
        if warpgroups == 1:
            is_divisible = self.features * self.itemsize % ACCESS_BYTES == 0
            fits = self.features * max(1, self.sums) <= LONGEST_WHOLE_ROW
        else:
            is_divisible = split_warp_row(self.features, self.itemsize, warpgroups=warpgroups) is not None
            # Four warpgroups have 128 registers per thread: enough for 16 columns with two kinds of sums, or a mask.
            fits = columns <= (16 if warpgroups == 4 and (self.sums > 1 or self.has_dropout) else 32)
        if not (is_divisible and fits) or warpgroups * blocks_per_core > 12:
            return None
        # Barriers take a page; sums over a single warpgroup take 2 KiB of scratch.
        others = self.features * self.gain_bytes + (4096 if warpgroups == 1 else 3072)
        budget = SHARED_MEMORY_BYTES // blocks_per_core - BLOCK_RESERVED_BYTES - others
        steps = min(most_steps, budget // (self.streams * self.features * self.itemsize))
        if steps < 2:
            return None
        return BackwardConfig(warpgroups=warpgroups, blocks_per_core=blocks_per_core, steps=steps)

    def default(self) -> BackwardConfig | None:
        """Returns the untuned configuration, or None if XLA is faster.

        A kernel that reads long rows in chunks took 19.2 µs at 64 x 15712, XLA 11.4; with a residual it took 65.5 µs at
        521 x 11168, XLA 39.9.
        """
        if short_rows_at_once((self.rows, self.features), self.itemsize):
            return BackwardConfig(loads="registers", blocks_per_core=5 if self.features <= 256 else 4)
        blocks = (3, 2, 1) if self.features <= 4096 else (2, 1)  # more columns take 216 or more registers
        # Rows too long for one warpgroup, which several load with less than 16 bytes per thread.
        narrow = (self.ring(warpgroups=w, blocks_per_core=1) for w in (2, 4))
        whole = (self.ring(warpgroups=1, blocks_per_core=b) for b in blocks)
        configs = (*self._even_choices(), *whole, *narrow)
        return next((config for config in configs if config is not None), None)

    def _even_choices(self) -> list[BackwardConfig | None]:
        """Returns configurations in which each thread has 16 bytes of a row or more, best first."""
        if self.itemsize == 2 and self.features == 8192 and self.streams == 2 and not self.has_dropout:
            # RMSNorm of 8192 rows, forward and backward: 168 µs, with rows that are read again 196.
            found = self.ring(warpgroups=4, blocks_per_core=1, most_steps=2)
            return [found and replace(found, keeps_row=True)]
        # Fewer warpgroups if four would not have 16 bytes of a row per thread. LayerNorm joins four sums of each line,
        # which is slower with 16 warps than with 8: 290 and 257 µs at 32768 x 4096 bf16.
        per_warpgroup = THREADS * ACCESS_BYTES // self.itemsize
        most = 2 if self.features <= 4096 and self.centered else 4
        warpgroups = next((w for w in (4, 2, 1) if w <= most and self.features % (w * per_warpgroup) == 0), 0)
        # With two streams, a second block per multiprocessor fills idle time.
        four = (2, 1) if self.streams == 2 and not (self.centered or self.has_dropout) else (1,)
        two = (1,) if self.centered and self.streams == 3 and self.features > 2048 else (2, 1)
        blocks = {4: four, 2: two, 1: (6, 4, 3, 2, 1) if self.features <= 4096 else (), 0: ()}[warpgroups]
        if self.streams == 2 and self.itemsize == 2 and not self.has_dropout:
            return self._by_bytes_in_flight(warpgroups, blocks)
        # 64 KiB in flight are enough, and 128 cost up to 10 %: RMSNorm after dropout takes 174 µs at 8192 x 8192 bf16,
        # with 4 rows in flight 187.
        steps = 2 if self.itemsize == 2 and self.features == 8192 else 4
        return [self.ring(warpgroups=warpgroups, blocks_per_core=b, most_steps=steps) for b in blocks]

    def _by_bytes_in_flight(self, warpgroups: int, blocks: Sequence[int]) -> list[BackwardConfig | None]:
        """Returns a configuration for each number of blocks, the closest to `IN_FLIGHT_BYTES` first.

        A block reads one row while the others of its ring are in flight. More than 48 KB slow the memory down: on an
        H100, bf16 without a residual, RMSNorm takes 308 µs at 32768 x 4096 with 96 KB and 292 with 32, 295 at 65536 x
        2048 with 48 and 280 with 32, 154 at 65536 x 1024 with 72 and 140 with 36. LayerNorm takes 311 and 296, 285 and
        288, 163 and 140. Less than 24 KB are too few: 16384 x 5120 takes 217 µs with 20 and 174 with 40.
        """
        row = self.streams * self.features * self.itemsize
        waiting = {b: max(1, min(3, round(IN_FLIGHT_BYTES / (b * row)))) for b in blocks}
        best_first = sorted(blocks, key=lambda b: abs(waiting[b] * b * row - IN_FLIGHT_BYTES))
        return [self.ring(warpgroups=warpgroups, blocks_per_core=b, most_steps=1 + waiting[b]) for b in best_first]


def reads_ahead(rows: int, features: int, itemsize: int, *, gain_bytes: int, cores: int) -> bool:
    """Whether the forward kernel reads the whole scale and bias before it sums a row, which hides their latency.

    gain_bytes: bytes of one value of scale and bias together. cores: the multiprocessors of the device.
    """
    # In narrower accesses each value of 16 bits takes a register, and long rows would spill.
    is_wide = features * itemsize % ACCESS_BYTES == 0
    # On an H200, µs: 64 x 15544 2.96 to 2.50, 21 x 13056 2.90 to 2.34; but 120 x 10240 2.30 to 2.82.
    return rows <= cores // 2 and is_wide and features * (4 + itemsize + gain_bytes) <= MOST_READ_AHEAD
