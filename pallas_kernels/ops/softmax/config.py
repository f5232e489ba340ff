"""Launch configurations of the softmax kernels: their parameters and the untuned defaults."""

from __future__ import annotations

from dataclasses import dataclass

CAUSAL_PIECES = 8
"""The most pieces of a causal row in registers; pieces right of the diagonal are not read from memory."""

MOST_REPEATED = 1.25
"""The most rows computed for each row, where a warpgroup takes several rows at once and the last one repeats some."""

SHARED_BYTES = 220 * 1024
"""The most shared memory for the rows of a block."""


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """How a kernel splits its work: one block of one warpgroup per row.

    register_columns: the longest row held in registers.
    shared_warpgroups: in the backward pass, the warpgroups of a block that holds a longer row in shared memory, if it
        fits and divides evenly over them; 0 for no such block.
    shared_columns: columns of such a row that a warp has in registers at a time.
    chunk: columns in registers at a time in a row that is longer still. Such a row is read twice, the second time from
        the L2 cache.
    """

    register_columns: int
    shared_warpgroups: int = 0
    shared_columns: int = 512
    chunk: int = 4096


DEFAULT_FORWARD = RowConfig(register_columns=16384)
"""The untuned configuration: 64 KiB of float32 weights fill half of the registers."""


def default_backward(itemsize: int) -> RowConfig:
    """Returns the untuned configuration.

    Two rows take 145 registers per thread at 8192 columns; longer rows go to shared memory.
    """
    return RowConfig(register_columns=8192, shared_warpgroups=4, chunk=8192 // itemsize)
