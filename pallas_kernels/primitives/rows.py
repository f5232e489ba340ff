"""A row in the registers of one warpgroup.

A row of `features` values is cut into segments. Thread t of the 128 holds `vector` neighbouring values out of every
128 x `vector`; the widest vectors come first, so that nearly all of a row moves in 16-byte accesses and a length that
is no multiple of anything still fits:

    1152 bf16 values = 1024 (vectors of 8) + 128 (vectors of 1)
    4097 bf16 values = 4096 (vectors of 1: rows start on odd addresses) + the last 128 again, 127 of them masked

Mosaic GPU has no masked loads. The last segment of a ragged row therefore starts early, inside the one before, and its
first `repeated` values are left out of sums. Stores write them a second time, with the same bits, from the same
warpgroup.

Row values are tuples of float32 arrays, one a segment, so `jax.tree.map` works on them.

Of short rows each warp holds whole ones, several in turn (`WarpSegment`). What is a scalar for one row, such as its
sum, is then a value a line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.primitives.compat import store

THREADS = 128
"""Threads of a warpgroup."""
WARPS = 4
"""Warps of a warpgroup."""
WARP_LANES = THREADS // WARPS
"""Threads of a warp."""
ACCESS_BYTES = 16
"""The widest access of one thread."""

SHORT_ROW_BYTES = 2048
"""Rows of fewer bytes are short: a warp holds whole rows.

A GPU starts 1.6 blocks a nanosecond, which for short rows takes longer than to read and write them. On an H200, bf16,
µs with a warp and with a warpgroup for each row, and of XLA: at 65536 x 128 softmax takes 8.7, 41.0 and 26.9, RMS norm
with its gradient 25.3, 98.8 and 46.0; at 65536 x 512 32.8, 46.4 and 88.9, and 86.9, 116.6 and 166.4; at 40000 x 896
softmax takes 35.0, 50.7 and 94.9, RMS norm with its gradient 105, 119 and 122; at 32768 x 1024 32.8, 34.4 and 88.5, and
100.2, 91.5 and 169.3.
"""
MANY_ROWS = 256
"""The fewest rows for which that was measured, and was as fast."""
VALUES_AT_ONCE = 512
"""Values that a warp holds at once, 16 for each thread. With 256 or 1024, rows of 128 to 512 take up to 10 % more."""

RowValues = tuple[jax.Array, ...]
Row = jax.Array | pl.Slice
"""The index of one row, or of the rows that a warpgroup takes at once."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Columns `offset` to `offset + size` of a row, with `vector` values per thread and access.

    The first `repeated` columns are also in the segment before.
    """

    offset: int
    size: int
    vector: int
    repeated: int = 0

    @property
    def threads(self) -> int:
        """The number of threads that share a line of the segment."""
        return THREADS

    @property
    def layout(self) -> plgpu.Layout | Any:
        """The layout of the segment over the warpgroup."""
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vector)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the segment as an array."""
        return (self.size,)

    @property
    def index(self) -> tuple[pl.Slice | slice, ...]:
        """The segment as an index of the row."""
        return (pl.ds(self.offset, self.size),)

    def columns(self, dtype: DTypeLike = jnp.int32) -> jax.Array:
        """The column of each value, an integer array of the segment's shape and layout."""
        return plgpu.broadcasted_iota(dtype, self.shape, len(self.shape) - 1, layout=self.layout) + jnp.asarray(
            self.offset, dtype
        )


@dataclass(frozen=True, kw_only=True)
class WarpSegment(Segment):
    """A segment of several lines, which the four warps of the warpgroup hold in turn.

    Sums over a line then need no other warp. Lines are whole short rows, or the parts of a row that several warpgroups
    hold together: sums over a whole warpgroup use scratch memory that Mosaic GPU shares between warpgroups without
    synchronising them.
    """

    lines: int = WARPS

    @property
    def threads(self) -> int:
        """The number of threads that share a line of the segment."""
        return THREADS // WARPS

    @property
    def layout(self) -> plgpu.Layout | Any:
        """The layout of the segment over the warpgroup."""
        tiling = plgpu.Tiling(((WARPS, 32 * self.vector), (self.vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the segment as an array."""
        return (self.lines, self.size)

    @property
    def index(self) -> tuple[pl.Slice | slice, ...]:
        """The segment as an index of the (lines, columns)."""
        return (slice(None), pl.ds(self.offset, self.size))

    def row_columns(self, dtype: DTypeLike = jnp.int32, *, group: jax.Array | int, line: int) -> jax.Array:
        """The column of each value in the whole row; the part is the `group`-th and has lines of `line` columns."""
        lines = plgpu.broadcasted_iota(dtype, self.shape, 0, layout=self.layout)
        start = jnp.asarray(group).astype(dtype) * jnp.asarray(WARPS * line, dtype)
        return lines * jnp.asarray(line, dtype) + self.columns(dtype) + start


def split_row(features: int, itemsize: int, *, offset: int = 0, stride: int | None = None) -> tuple[Segment, ...]:
    """Cuts `features` values of `itemsize` bytes, from column `offset` on, into segments.

    `stride` is the length of the whole row (default: `features`), which decides how its accesses are aligned.

    A tail of less than 128 columns needs at least 128 columns in all: in front of `offset` or in the segments.

    Raises:
        ValueError: for a row of fewer than 128 features, which one warpgroup cannot share.
    """
    if features + offset < THREADS:
        raise ValueError(f"a warpgroup shares at least {THREADS} values of a row, got {features}")
    stride = features + offset if stride is None else stride
    vector = max(1, ACCESS_BYTES // itemsize)
    while stride % vector or offset % vector:
        vector //= 2
    segments = []
    start, left = offset, features
    while vector:
        size = left - left % (THREADS * vector)
        if size:
            segments.append(Segment(offset=start, size=size, vector=vector))
            start, left = start + size, left - size
        vector //= 2
    if left:
        segments.append(Segment(offset=start + left - THREADS, size=THREADS, vector=1, repeated=THREADS - left))
    return tuple(segments)


def split_warp_row(features: int, itemsize: int, *, warpgroups: int) -> tuple[WarpSegment, ...] | None:
    """Returns one warpgroup's segment of a row that `warpgroups` hold together, viewed as (warpgroups, 4, columns).

    Returns None if the row does not divide evenly: Mosaic GPU tiles only lines of whole tiles.
    """
    columns, left = divmod(features, warpgroups * WARPS)
    vector = ACCESS_BYTES // itemsize
    while vector and columns % (32 * vector):
        vector //= 2
    return (WarpSegment(offset=0, size=columns, vector=vector),) if vector and columns and not left else None


def short_rows_at_once(shape: tuple[int, ...], itemsize: int) -> int:
    """Returns how many of (rows, features) a warpgroup takes at once, if its warps hold whole ones; else 0."""
    rows, features = shape
    is_short = features * itemsize < SHORT_ROW_BYTES and rows >= MANY_ROWS
    return WARPS * max(1, VALUES_AT_ONCE // (THREADS * -(-features // THREADS))) if is_short else 0


def row_grid(rows: int, at_once: int = 0, parts: int = 1) -> dict[str, int]:
    """Returns the grid that has a block for each row, or for each slice of `at_once` rows; see `row_of_block`."""
    return {"block": parts * pl.cdiv(rows // parts, at_once or 1)}


def row_of_block(rows: int, at_once: int, parts: int = 1) -> Row:
    """Returns the row that a block of `row_grid` computes, or a slice of `at_once` rows.

    No slice crosses from one of `parts` equal parts of the rows to the next: a part's last slice may repeat rows.
    """
    block = lax.axis_index("block")
    if not at_once:
        return block
    if parts == 1:
        return pl.ds(jnp.minimum(block * at_once, rows - at_once), at_once)
    part_rows = rows // parts
    part_blocks = pl.cdiv(part_rows, at_once)
    first = jnp.minimum(lax.rem(block, part_blocks) * at_once, part_rows - at_once)
    return pl.ds(lax.div(block, part_blocks) * part_rows + first, at_once)


def split_short_rows(features: int, itemsize: int, *, rows: int) -> tuple[WarpSegment, ...]:
    """Cuts rows that a warpgroup takes at once into pieces of one access per thread, all of the same shape.

    Where they do not divide evenly, the last piece starts early.
    """
    vector = ACCESS_BYTES // itemsize
    while features % vector or THREADS // WARPS * vector > features:
        vector //= 2
    size = THREADS // WARPS * vector
    last = features - size
    pieces = [WarpSegment(offset=at, size=size, vector=vector, lines=rows) for at in range(0, last, size)]
    repeated = len(pieces) * size - last
    return (*pieces, WarpSegment(offset=last, size=size, vector=vector, lines=rows, repeated=repeated))


def cut_row(segments: Sequence[Segment], vectors: int) -> tuple[Segment, ...]:
    """Cuts the segments into pieces of at most `vectors` accesses per thread.

    Work done piece by piece needs only one piece's operands in registers.
    """
    pieces = []
    for segment in segments:
        size = segment.threads * segment.vector * vectors
        if segment.repeated or segment.size <= size:
            pieces.append(segment)
            continue
        stop = segment.offset + segment.size
        starts = range(segment.offset, stop, size)
        pieces += [replace(segment, offset=at, size=min(size, stop - at)) for at in starts]
    return tuple(pieces)


def load_row(ref, segments: Sequence[Segment]) -> RowValues:
    """Reads one row of a (features,) reference, in the reference's dtype."""
    return tuple(plgpu.load(ref.at[s.index], layout=s.layout, optimized=False) for s in segments)


def load_columns(ref, segments: Sequence[Segment]) -> RowValues:
    """Reads one value a column of a (features,) reference, for each row that the warpgroup holds."""
    return tuple(
        _over_lines(plgpu.load(ref.at[s.index[-1:]], layout=s.layout.reduce(0), optimized=False), s, 1)
        if isinstance(s, WarpSegment)
        else load_row(ref, (s,))[0]
        for s in segments
    )


def load_lines(ref, segments: Sequence[Segment]) -> jax.Array:
    """Reads one value a line of a (lines,) reference."""
    return plgpu.load(ref, layout=segments[0].layout.reduce(1), optimized=False)


def row_index(row: Row, segments: Sequence[Segment]) -> jax.Array:
    """Returns the row index: a scalar for one row, else that of each value."""
    if not isinstance(row, pl.Slice):
        return row
    return plgpu.broadcasted_iota(jnp.int32, segments[0].shape, 0, layout=segments[0].layout) + row.start


def store_row(ref, values: RowValues, segments: Sequence[Segment]) -> None:
    """Writes one row, cast to the reference's dtype."""
    for segment, value in zip(segments, values, strict=True):
        store(ref.at[segment.index], value.astype(ref.dtype))


def map_row(function: Callable[..., jax.Array], *rows: RowValues) -> RowValues:
    """Applies `function` to the matching segments of rows."""
    return tuple(function(*values) for values in zip(*rows, strict=True))


def to_float32(values: RowValues) -> RowValues:
    """Casts the row to float32."""
    return tuple(v.astype(jnp.float32) for v in values)


def zeros_row(segments: Sequence[Segment]) -> RowValues:
    """Returns a row of float32 zeros, to accumulate into."""
    return tuple(plgpu.layout_cast(jnp.zeros(s.shape, jnp.float32), s.layout) for s in segments)


def sum_of(value: jax.Array, axis: int | None = None) -> jax.Array:
    """Computes `jnp.sum` of an array of 32-bit values that a warpgroup shares, with the same result in all lanes.

    If each thread has one value, it adds that to its neighbour's. If the value is a product, the compiler may fuse
    product and addition into a multiply-add, which rounds the neighbour's product but not the thread's own. Lanes then
    disagree in the last place. So this hides the product from the compiler.
    """
    return jnp.sum(lax.optimization_barrier(value) if value.size == THREADS else value, axis=axis)


def line_sums(values: RowValues, segments: Sequence[Segment]) -> jax.Array:
    """Sums over each line: (lines,). Repeated columns count once."""
    return functools.reduce(jnp.add, [sum_of(value, axis=1) for value in _counted(values, segments)])


def line_max(values: RowValues) -> jax.Array:
    """Returns the largest value of each line, (lines,), of segments of the same shape."""
    return jnp.max(functools.reduce(jnp.maximum, values), axis=1)


def over_lines(line_values: jax.Array, segments: Sequence[Segment]) -> RowValues:
    """Broadcasts (lines,) values, each to the width of its line."""
    return tuple(_over_lines(line_values, segment, 0) for segment in segments)


def _over_lines(values: jax.Array, segment: Segment, axis: int) -> jax.Array:
    """Broadcasts one value per line (axis 0) or per column (axis 1) over the segment."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, segment.shape, (axis,)), segment.layout)


def row_sum(values: RowValues, segments: Sequence[Segment]) -> jax.Array:
    """Sums over a row; every thread holds the result, in the values' dtype. Repeated columns count once."""
    return functools.reduce(jnp.add, [sum_of(value) for value in _counted(values, segments)])


def _counted(values: RowValues, segments: Sequence[Segment]) -> list[jax.Array]:
    """Returns arrays whose sum counts each column once."""
    counted = []
    for segment, value in zip(segments, values, strict=True):
        if segment.repeated:
            column = plgpu.broadcasted_iota(jnp.int32, segment.shape, len(segment.shape) - 1, layout=segment.layout)
            value = jnp.where(column >= segment.repeated, value, jnp.zeros((), value.dtype))
        counted.append((value, segment.layout))
    return _folded(*zip(*counted, strict=True))


def _folded(values: Sequence[jax.Array], layouts: Sequence[Any]) -> list[jax.Array]:
    """Adds pieces of the same shape and layout, so that one sum over threads is enough."""
    folded: dict[Any, jax.Array] = {}
    for value, layout in zip(values, layouts, strict=True):
        key = (value.shape, layout)
        folded[key] = folded[key] + value if key in folded else value
    return list(folded.values())


def row_max(values: RowValues) -> jax.Array:
    """Returns the maximum of a row, in every thread. Repeated columns do not matter."""
    return functools.reduce(jnp.maximum, [jnp.max(value) for value in values])


def row_columns(segments: Sequence[Segment]) -> RowValues:
    """Returns the column of each value of a row, int32."""
    return tuple(
        plgpu.broadcasted_iota(jnp.int32, s.shape, len(s.shape) - 1, layout=s.layout) + s.offset for s in segments
    )


def full_row(segments: Sequence[Segment], value: float) -> RowValues:
    """Returns a row filled with a float32 value."""
    return tuple(plgpu.layout_cast(jnp.full(s.shape, value, jnp.float32), s.layout) for s in segments)
