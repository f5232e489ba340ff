"""Elementwise work on (rows, features) arrays, cut into blocks of one warpgroup.

A block takes `columns` neighbouring values of one row; the last block of a row takes what is left beside its own, so
that any length fits (see `rows` for how). An array whose rows do not matter is one row. A block goes through its part
segment by segment: registers hold one segment at a time, and all of a segment's loads are under way together.
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
"""For kernels whose threads read back nothing, or only after a barrier of ours or what they wrote themselves."""
MAX_FOLDED = 2**16
"""The most values of a folded row."""
FOLD_ELEMENTS = 2**20
"""The fewest values of an array for which the launch that repeats the bias pays."""
FOLD_FROM = 6.0
"""How many times the accesses of folded rows unfolded ones must need: rows of 4097 are faster folded, of 1000 and 1152
the forward pass is not (see bias_activation/TUNING.md)."""
MAX_ELEMENTS = 2**31 - 1
"""The most values of a row: columns are counted in int32."""
FEW_BLOCKS = 1024
"""Below about this many blocks a GPU is not full, and smaller blocks end sooner."""


@dataclass(frozen=True, kw_only=True)
class ElementwiseConfig:
    """The work of a block of one warpgroup: `vectors` accesses of 16 bytes a thread, of each of `rows` rows.

    A bias is read once for those rows. Without one there is only one long row.
    """

    vectors: int = 1
    rows: int = 1


def default_elementwise(rows: int, features: int, itemsize: int, *, has_bias: bool = False) -> ElementwiseConfig:
    """The untuned choice."""
    config = ElementwiseConfig(vectors=1, rows=2) if has_bias else ElementwiseConfig(vectors=2, rows=1)
    blocks = rows * features // (config.rows * access_columns(config.vectors, itemsize))
    return config if blocks >= FEW_BLOCKS else ElementwiseConfig()


def elementwise_candidates(*, has_bias: bool = False) -> dict[str, ElementwiseConfig]:
    """The configurations worth measuring, by name."""
    shapes = ((1, 1), (1, 2), (1, 4), (2, 2), (4, 1)) if has_bias else ((1, 1), (2, 1), (4, 1))
    return {f"{v} vectors {r} rows": ElementwiseConfig(vectors=v, rows=r) for v, r in shapes}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of a row that registers hold at once: its columns in the row, its first column in the block, its layout."""

    columns: pl.Slice
    start: int
    segment: Segment

    def segment_columns(self) -> jax.Array:
        """The place of each value in the part, int32.

        Made as (accesses, values of an access), so that the compiler sees a value's place in its access: it is the
        same in all threads.
        """
        vector = self.segment.vector
        shape = (self.segment.size // vector, vector)
        layout = plgpu.Layout.WG_STRIDED(shape, vec_size=vector)
        access, place = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in range(2))
        return (access * jnp.int32(vector) + place).reshape(self.segment.size)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Splits `rows` rows of `features` values of `itemsize` bytes over blocks.

    A block has `columns` columns, a whole number of accesses of 16 bytes of every thread; a row's last block has up to
    twice as many. `stride` is from one row's start to the next (default: `features`, where there are several rows),
    and decides how accesses are aligned.
    """

    rows: int
    features: int
    columns: int
    itemsize: int
    stride: int | None = None

    @property
    def blocks_per_row(self) -> int:
        """Blocks a row."""
        return max(1, self.features // self.columns)

    @property
    def count(self) -> int:
        """Blocks in all."""
        return self.rows * self.blocks_per_row

    @property
    def widest(self) -> int:
        """Columns of the widest block."""
        return self.features - (self.blocks_per_row - 1) * self.columns

    def run(self, block: jax.Array, work: Callable[[jax.Array, tuple[Part, ...]], None]) -> None:
        """Calls `work` with the row and the parts of a block, in a kernel."""
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
    """The segment in pieces of at most `columns` values."""
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
    """Runs a kernel called `name` over all blocks; returns what it writes, a tree like `out_type`.

    make_work: in the kernel, from the operands' references, by name, and the results' references, makes what
        `Blocks.run` calls.
    """

    def kernel(*all_refs):
        refs = dict(zip(operands, all_refs, strict=False))
        blocks.run(lax.axis_index("block"), make_work(refs, *all_refs[len(operands) :]))

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
    """The most rows a block can take at once, up to `wanted`, so that all blocks take as many."""
    while rows % wanted:
        wanted -= 1
    return wanted


def access_columns(vectors: int, itemsize: int) -> int:
    """The number of values of `itemsize` bytes that a warpgroup reads in `vectors` accesses of 16 bytes a thread."""
    return vectors * LANES * (ACCESS_BYTES // itemsize)


def accesses_a_value(features: int, itemsize: int) -> float:
    """Accesses of a thread for each value of a row: an eighth, for 16-bit values and aligned rows."""
    return sum(segment.size / segment.vector for segment in split_row(features, itemsize)) / features


def folded_rows(rows: int, features: int, itemsize: int) -> int:
    """The number of rows that kernels treat as one, where only a bias distinguishes columns.

    One, where a row's accesses are wide already or the array is small; else the power of two that divides `rows` and
    makes rows of the widest accesses, and of 128 values at least. The bias must be repeated as often.
    """
    if rows * features >= 2**32:  # dropout counts elements in 32 bits
        return 1
    powers = [2**n for n in range(17) if rows % 2**n == 0 and 2**n * features <= MAX_FOLDED]
    costs = {n: accesses_a_value(n * features, itemsize) for n in powers if n * features >= LANES}
    if not costs or (1 in costs and rows * features < FOLD_ELEMENTS):
        return 1
    if 1 in costs and costs[1] <= FOLD_FROM * min(costs.values()):
        return 1
    return next(n for n in costs if costs[n] <= 1.05 * min(costs.values()))


def elementwise_unsupported(rows: int, features: int) -> str | None:
    """Why rows of this length cannot be split, or None where they can. Empty arrays need no kernel."""
    if not rows * features:
        return None
    if features < LANES:
        return f"rows have {features} values, a warpgroup shares at least {LANES}"
    if features > MAX_ELEMENTS:
        return f"rows have {features} values, the kernels count at most {MAX_ELEMENTS}"
    return None
