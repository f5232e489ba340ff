"""Launch configurations of the norms: their parameters and the untuned defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.primitives.rows import ACCESS_BYTES, THREADS, WARPS, short_rows_at_once, split_warp_row

SHARED_MEMORY_BYTES = 228 * 1024
"""Shared memory of a streaming multiprocessor of Hopper."""
BLOCK_RESERVED_BYTES = 1024
"""Shared memory that the driver reserves for each block."""
LONGEST_ROW = 16384
"""The longest row that the forward pass holds in registers as float32: 206 a thread in bf16."""
MOST_READ_AHEAD = 122 * 1024
"""The most bytes of a row in float32, of its values as stored, and of scale and bias that registers hold together."""
IN_FLIGHT_BYTES = 36 * 1024
"""Bytes of rows to have in flight to a multiprocessor while each of its blocks differentiates one: see TUNING.md."""
COLUMNS = 16
"""A thread's columns of a row, in the backward pass, with which four warpgroups fit on a multiprocessor."""


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the forward kernel splits its work: one block of one warpgroup per row.

    piece: accesses of a thread for which scale and bias are in registers at the same time; 0: all of the row's.
    reads_ahead: whether the whole scale and bias are read before the row is summed, which hides their latency.
    """

    piece: int = 0
    reads_ahead: bool = False


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


def default_backward(
    shape: tuple[int, ...], itemsize: int, *, streams: int, gain_bytes: int, sums: int, has_dropout: bool = False
) -> BackwardConfig | None:
    """Returns the untuned configuration for (rows, features), or None if XLA is to differentiate them.

    As many warpgroups share a row as give each thread `COLUMNS`, and as many blocks share a multiprocessor as make four
    warpgroups.

    streams: arrays read row by row (x, dy, and the sum's cotangent if there is one). gain_bytes: bytes of one value of
    the scale; 0 without a scale. sums: gradients summed over columns (scale, bias). has_dropout: whether the kernel
    also writes the gradient of the dropout's input.
    """
    features = shape[1]
    if short_rows_at_once(shape, itemsize):
        return BackwardConfig(loads="registers", blocks_per_core=5 if features <= 256 else 4)
    warpgroups = next(n for n in (4, 2, 1) if n == 1 or _is_shared(features, itemsize, n))
    columns = features // (warpgroups * THREADS)
    # A thread has 128 registers in four warpgroups, else 255, and holds a row, its sums or its mask.
    most = 2 * COLUMNS if warpgroups > 1 else 4 * COLUMNS // max(1, sums)
    if warpgroups == 4 and (sums > 1 or has_dropout):
        most = COLUMNS
    if columns > most or features * itemsize % ACCESS_BYTES:
        return None
    most_blocks = max(1 if warpgroups > 1 else 2, min(4 // warpgroups, 4 * COLUMNS * THREADS // features))
    keeps_row = warpgroups == 4 and columns <= COLUMNS and not has_dropout
    row = streams * features * itemsize
    for blocks in range(most_blocks, 0, -1):
        # A kept row leaves its stage at once: on an H100, 16384 x 5120 takes 175 µs with 2 stages and 185 with 3. One
        # that is read again leaves it after the next one has come: a single block of two warpgroups took 439 and 361.
        waiting = 1 if keeps_row else max(1, min(3, round(IN_FLIGHT_BYTES / (blocks * row)))) + (blocks == 1)
        # Barriers take a page; sums over a single warpgroup take 2 KiB of scratch.
        others = features * gain_bytes + (4096 if warpgroups == 1 else 3072)
        fitting = (SHARED_MEMORY_BYTES // blocks - BLOCK_RESERVED_BYTES - others) // row
        if fitting >= 2:
            return BackwardConfig(
                warpgroups=warpgroups, blocks_per_core=blocks, steps=min(1 + waiting, fitting), keeps_row=keeps_row
            )
    return None


def _is_shared(features: int, itemsize: int, warpgroups: int) -> bool:
    """Whether several warpgroups share rows: long ones, of which each thread reads at least two values at once."""
    segments = split_warp_row(features, itemsize, warpgroups=warpgroups)
    is_long = features > COLUMNS * THREADS * warpgroups // 2
    return is_long and segments is not None and segments[0].vector * itemsize >= 4


def default_forward(
    rows: int, features: int, itemsize: int, *, gain_bytes: int, centered: bool, cores: int
) -> ForwardConfig:
    """Chooses how the forward kernel reads a row.

    gain_bytes: bytes of one value of scale and bias together. cores: the multiprocessors of the device.
    """
    # In narrower accesses each value of 16 bits takes a register, and long rows would spill.
    is_wide = features * itemsize % ACCESS_BYTES == 0
    # On an H200, µs: 64 x 15544 2.96 to 2.50, 21 x 13056 2.90 to 2.34; but 120 x 10240 2.30 to 2.82.
    if rows <= cores // 2 and is_wide and features * (4 + itemsize + gain_bytes) <= MOST_READ_AHEAD:
        return ForwardConfig(reads_ahead=True)
    if centered and 2048 < features <= (8192 if itemsize == 2 else 3072):
        # LayerNorm at 8192 x 8192 bf16: 167 registers and 71.4 µs, in pieces 127 and 66.5 µs.
        # 896 x 3040 float32: 8.6 and 6.9 µs, as all rows run at once; but 1200 x 4096 10.6 and 12.5.
        return ForwardConfig(piece=2 if features <= 4096 else 4)
    return ForwardConfig()
