"""Rows of kernels in which a warpgroup computes one row, or several short ones.

The body of such a kernel loads the row that `row_of_block` gives it, reduces it to values of the row, such as its sum,
and finishes it. `HeldRows` lets one body serve both a long row and short ones;
`RowChunks` are of a row that registers do not hold: it is read again, from the L2 cache, or blocks share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.rows import (
    THREADS,
    Row,
    RowValues,
    Segment,
    line_max,
    line_sums,
    load_lines,
    load_row,
    map_row,
    over_lines,
    row_columns,
    row_index,
    row_max,
    row_sum,
    short_rows_at_once,
    split_row,
    split_short_rows,
    store_row,
    to_float32,
)


@dataclass(frozen=True, kw_only=True)
class HeldRows:
    """The row of a block, or its short rows.

    A value of the row, such as its sum, is a scalar for one row and an array (rows,) for several.

    at: the row's index, or the slice of the rows. segments: how the warpgroup holds them.
    """

    at: Row
    segments: tuple[Segment, ...]

    @property
    def _are_several(self) -> bool:
        return isinstance(self.at, pl.Slice)

    @property
    def index(self) -> jax.Array:
        """The row's index: a scalar for one row, else that of each element."""
        return row_index(self.at, self.segments)

    @property
    def columns(self) -> RowValues:
        """Each element's column."""
        return row_columns(self.segments)

    def load(self, ref: Any) -> RowValues:
        """Reads the row from a reference (rows, features), as float32."""
        return to_float32(load_row(ref.at[self.at], self.segments))

    def element(self, ref: Any, values: RowValues, column: jax.Array) -> jax.Array:
        """Returns, as float32, the row's element in a column, a value of the row. values: the row, from `ref`."""
        if not self._are_several:
            return ref[self.at, column].astype(jnp.float32)
        wanted = self.spread(column)
        return self.sum(map_row(lambda v, c: jnp.where(c == wanted, v, jnp.float32(0)), values, self.columns))

    def store(self, ref: Any, values: RowValues) -> None:
        """Writes the row, cast to the reference's dtype."""
        store_row(ref.at[self.at], values, self.segments)

    def load_value(self, ref: Any) -> jax.Array:
        """Reads the row's value from a reference (rows,)."""
        return load_lines(ref.at[self.at], self.segments) if self._are_several else ref[self.at]

    def store_value(self, ref: Any, value: jax.Array) -> None:
        """Writes the row's value to a reference (rows,)."""
        if self._are_several:
            store(ref.at[self.at], value)
        else:
            ref[self.at] = value

    def sum(self, values: RowValues) -> jax.Array:
        """Sums over the row. Repeated columns count once."""
        return (line_sums if self._are_several else row_sum)(values, self.segments)

    def max(self, values: RowValues) -> jax.Array:
        """Returns the row's maximum."""
        return line_max(values) if self._are_several else row_max(values)

    def spread(self, value: jax.Array) -> jax.Array:
        """Broadcasts the row's value, so that it combines with the row's elements."""
        return over_lines(value, self.segments[:1])[0] if self._are_several else value


def held_segments(shape: tuple[int, ...], itemsize: int, at_once: int | None = None) -> tuple[int, tuple[Segment, ...]]:
    """Returns how many of (rows, features) a block holds at once, 0 if they are not short, and their segments.

    at_once: that number, if it is known.
    """
    if at_once is None:
        at_once = short_rows_at_once(shape, itemsize)
    if at_once:
        return at_once, split_short_rows(shape[1], itemsize, rows=at_once)
    return 0, split_row(shape[1], itemsize)


@dataclass(frozen=True, kw_only=True)
class RowChunks:
    """A row too long for registers, cut into `trips` chunks of `chunk` columns and a rest.

    Functions take a part of the row: its columns, a slice of the row, and its segments within that slice. No segment of
    the rest repeats columns of a chunk, which another block may be writing, or has written in place.
    """

    features: int
    chunk: int
    trips: int
    segments: tuple[Segment, ...]
    rest: tuple[Segment, ...]

    @classmethod
    def make(cls, features: int, itemsize: int, chunk: int) -> RowChunks:
        """Cuts a row into chunks of `chunk` columns, or into one chunk if it is shorter."""
        chunk = min(chunk, features)
        trips, tail = divmod(features, chunk)
        if 0 < tail < THREADS:
            trips -= 1
        end = trips * chunk
        segments = split_row(chunk, itemsize, stride=features)
        rest = split_row(features - end, itemsize, offset=end, stride=features)
        return cls(features=features, chunk=chunk, trips=trips, segments=segments, rest=rest)

    @property
    def parts(self) -> int:
        """The number of parts."""
        return self.trips + bool(self.rest)

    @property
    def whole(self) -> pl.Slice:
        """The columns of which the rest's segments count."""
        return pl.ds(0, self.features)

    def columns(self, i: jax.Array) -> pl.Slice:
        """The columns of chunk i."""
        return pl.ds(i * self.chunk, self.chunk)

    def at(self, part: jax.Array, function: Callable[[pl.Slice, tuple[Segment, ...]], None]) -> None:
        """Calls `function` for one part, whose number is only known at run time."""
        in_chunk = lambda: function(self.columns(part), self.segments)  # noqa: E731
        if not self.rest:
            in_chunk()
        else:
            pl.when(part < self.trips)(in_chunk)
            pl.when(part == self.trips)(lambda: function(self.whole, self.rest))

    def each(self, function: Callable[[pl.Slice, tuple[Segment, ...]], None]) -> None:
        """Calls `function` for each part, the rest first."""
        if self.rest:
            function(self.whole, self.rest)

        @pl.loop(0, self.trips)
        def _(i):
            function(self.columns(i), self.segments)


def compiler_params(dtype: DTypeLike, **others: Any) -> plgpu.CompilerParams:
    """Returns the compiler parameters: approximate exponentials (2 ulp of float32) for 16-bit types only.

    There are no automatic barriers: each thread reads back only what it wrote itself, in the same layout.
    """
    return plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=jnp.dtype(dtype).itemsize < 4, **others)
