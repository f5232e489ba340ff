"""Elementwise work on (rows, features) arrays, cut into blocks of one warpgroup.

A block takes `columns` neighbouring values of one row. The last block of a row takes the remainder as well, so that any
length fits; see `rows`. An array whose row length does not matter is treated as one row. A block computes its part
segment by segment: registers hold one segment at a time, and all loads of a segment are in flight together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives import settings
from pallas_kernels.primitives.platform import varying_like
from pallas_kernels.primitives.rows import ACCESS_BYTES, LANES, Segment, split_row

COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True)
"""For kernels whose threads read back only what they wrote themselves, or what an explicit barrier protects."""
MAX_FOLDED = 2**16
"""The most values of a folded row."""
FOLD_ELEMENTS = 2**20
"""The fewest values of an array for which the launch that repeats the bias pays."""
FOLD_FROM = 6.0
"""Rows are folded if unfolded rows need this many times the accesses. Rows of 4097 values are faster folded; the
forward pass of 1000 and 1152 is not (see bias_activation/TUNING.md)."""
MAX_ELEMENTS = 2**31 - 1
"""The most values of a row: column indices are int32."""
FEW_BLOCKS = 1024
"""With fewer blocks than about this, a GPU is not full and smaller blocks finish sooner."""


@dataclass(frozen=True, kw_only=True)
class ElementwiseConfig:
    """The work of a block of one warpgroup: `vectors` 16-byte accesses per thread, in each of `rows` rows.

    A bias is read once for those rows. Without one there is only one long row.
    """

    vectors: int = 1
    rows: int = 1


def default_elementwise(rows: int, features: int, itemsize: int, *, has_bias: bool = False) -> ElementwiseConfig:
    """Returns the untuned configuration."""
    config = ElementwiseConfig(vectors=1, rows=2) if has_bias else ElementwiseConfig(vectors=2, rows=1)
    blocks = rows * features // (config.rows * access_columns(config.vectors, itemsize))
    return config if blocks >= FEW_BLOCKS else ElementwiseConfig()


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a row that registers hold at a time: its columns in the row, first column in the block, layout."""

    columns: pl.Slice
    start: int
    segment: Segment

    def segment_columns(self) -> jax.Array:
        """The position of each value in the part, int32.

        It is computed as (accesses, values of an access). So the compiler sees each value's position in its access,
        which is the same in all threads.
        """
        vector = self.segment.vector
        shape = (self.segment.size // vector, vector)
        layout = plgpu.Layout.WG_STRIDED(shape, vec_size=vector)
        access, place = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in range(2))
        return (access * jnp.int32(vector) + place).reshape(self.segment.size)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Splits `rows` rows of `features` values of `itemsize` bytes over blocks.

    A block has `columns` columns, a whole number of 16-byte accesses of every thread; a row's last block has up to
    twice as many. `stride` is the distance between the starts of two rows (default: `features` with several rows). It
    decides how accesses are aligned.
    """

    rows: int
    features: int
    columns: int
    itemsize: int
    stride: int | None = None

    @property
    def blocks_per_row(self) -> int:
        """The number of blocks per row."""
        return max(1, self.features // self.columns)

    @property
    def count(self) -> int:
        """The number of blocks."""
        return self.rows * self.blocks_per_row

    @property
    def widest(self) -> int:
        """Columns of the widest block."""
        return self.features - (self.blocks_per_row - 1) * self.columns

    def run(self, block: jax.Array, work: Callable[[jax.Array, tuple[Part, ...]], None]) -> None:
        """Calls `work` with the block's row and parts, in a kernel."""
        last = self.blocks_per_row - 1
        row, chunk = lax.div(block, self.blocks_per_row), lax.rem(block, self.blocks_per_row)
        stride = self.stride or (self.features if self.rows > 1 else self.columns)

        def whole_chunk():
            (segment,) = split_row(self.columns, self.itemsize, stride=stride)
            work(row, (Part(columns=pl.ds(chunk * self.columns, self.columns), start=0, segment=segment),))

        def last_chunk():
            first = last * self.columns
            segments = split_row(self.widest, self.itemsize, offset=first, stride=stride)
            pieces = [piece for segment in segments for piece in _pieces(segment, self.columns)]
            work(
                row,
                tuple(Part(columns=pl.ds(p.offset, p.size), start=p.offset - first, segment=p) for p in pieces),
            )

        if self.widest == self.columns:
            whole_chunk()
        elif last == 0:
            last_chunk()
        else:
            pl.when(chunk < last)(whole_chunk)
            pl.when(chunk == last)(last_chunk)


def _pieces(segment: Segment, columns: int) -> tuple[Segment, ...]:
    """Cuts the segment into pieces of at most `columns` values."""
    if segment.size <= columns:
        return (segment,)
    stop = segment.offset + segment.size
    starts = range(segment.offset, stop, columns)
    return tuple(Segment(offset=at, size=min(columns, stop - at), vector=segment.vector) for at in starts)


def launch(
    name: str,
    operands: Mapping[str, jax.Array],
    out_type: Any,
    blocks: Blocks,
    make_work: Callable[..., Callable[[jax.Array, tuple[Part, ...]], None]],
) -> Any:
    """Runs a kernel called `name` over all blocks; returns its results, a tree like `out_type`.

    make_work: called in the kernel with the operands' references, by name, and the results' references; returns the
        function that `Blocks.run` calls.
    """

    names = tuple(operands)

    def kernel(*all_refs):
        refs = dict(zip(names, all_refs, strict=False))
        blocks.run(lax.axis_index("block"), make_work(refs, *all_refs[len(names) :]))

    kernel.__name__ = name
    outputs = settings.kernel(
        kernel,
        out_type=out_type,
        grid=(blocks.count,),
        grid_names=("block",),
        compiler_params=COMPILER_PARAMS,
    )(*operands.values())
    return jax.tree.map(lambda output: varying_like(output, *operands.values()), outputs)


def rows_at_once(wanted: int, rows: int) -> int:
    """Returns the largest number of rows per block, up to `wanted`, that gives all blocks the same number."""
    while rows % wanted:
        wanted -= 1
    return wanted


def access_columns(vectors: int, itemsize: int) -> int:
    """Returns how many values of `itemsize` bytes a warpgroup reads in `vectors` 16-byte accesses per thread."""
    return vectors * LANES * (ACCESS_BYTES // itemsize)


def accesses_a_value(features: int, itemsize: int) -> float:
    """Returns a thread's accesses for each value of a row: 1/8 for 16-bit values and aligned rows."""
    return sum(segment.size / segment.vector for segment in split_row(features, itemsize)) / features


def folded_rows(rows: int, features: int, itemsize: int) -> int:
    """Returns the number of rows that kernels treat as one, if only a bias distinguishes columns.

    It is 1 if a row's accesses are already wide or the array is small. Else it is the power of two that divides `rows`
    and gives rows of at least 128 values with the widest accesses. The bias must be repeated as many times.
    """
    if rows * features >= 2**32:  # dropout's element indices have 32 bits
        return 1
    powers = [2**n for n in range(17) if rows % 2**n == 0 and 2**n * features <= MAX_FOLDED]
    costs = {n: accesses_a_value(n * features, itemsize) for n in powers if n * features >= LANES}
    if not costs or (1 in costs and rows * features < FOLD_ELEMENTS):
        return 1
    if 1 in costs and costs[1] <= FOLD_FROM * min(costs.values()):
        return 1
    return next(n for n in costs if costs[n] <= 1.05 * min(costs.values()))


def elementwise_unsupported(rows: int, features: int) -> str | None:
    """Returns why rows of this length cannot be split, or None where they can. Empty arrays need no kernel."""
    if not rows * features:
        return None
    if features < LANES:
        return f"rows have {features} values, a warpgroup shares at least {LANES}"
    if features > MAX_ELEMENTS:
        return f"rows have {features} values, the kernels count at most {MAX_ELEMENTS}"
    return None
