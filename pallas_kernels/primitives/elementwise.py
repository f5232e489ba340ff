"""Elementwise work on (rows, features) arrays, cut into blocks of one warpgroup.

A block takes `columns` neighbouring values of one row; the last block of a row takes what is left beside its own, so
that any length fits (see `rows` for how). An array whose rows do not matter is one row. A block goes through its part
segment by segment: registers hold one segment at a time, and all of a segment's loads are under way together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
from jax import lax

from pallas_kernels.primitives.rows import LANES, Segment, split_row

MAX_ELEMENTS = 2**31 - 1
"""Of a row: columns are counted in int32."""

Columns = pl.Slice
Step = Callable[[jax.Array, Columns, Segment], None]
"""What to do with one segment: its row, its columns in the row, and its layout."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How `rows` rows of `features` values of `itemsize` bytes are cut, at most twice `columns` (a multiple of 1024) a
    block."""

    rows: int
    features: int
    columns: int
    itemsize: int

    @property
    def a_row(self) -> int:
        """Blocks a row."""
        return max(1, self.features // self.columns)

    @property
    def count(self) -> int:
        """Blocks in all."""
        return self.rows * self.a_row

    def run(self, block: jax.Array, step: Step) -> None:
        """Does the work of one block, in a kernel."""
        last = self.a_row - 1
        row, chunk = lax.div(block, self.a_row), lax.rem(block, self.a_row)
        # One row alone starts where its array starts; only the columns have to be aligned.
        stride = self.features if self.rows > 1 else self.columns
        left = self.features - last * self.columns

        def whole_chunk():
            (segment,) = split_row(self.columns, self.itemsize, stride=stride)
            step(row, pl.ds(chunk * self.columns, self.columns), segment)

        def last_chunk():
            for segment in split_row(left, self.itemsize, offset=last * self.columns, stride=stride):
                for piece in _pieces(segment, self.columns):
                    step(row, pl.ds(piece.offset, piece.size), piece)

        if left == self.columns:
            whole_chunk()
        elif last == 0:
            last_chunk()
        else:
            pl.when(chunk < last)(whole_chunk)
            pl.when(chunk == last)(last_chunk)


def _pieces(segment: Segment, columns: int) -> tuple[Segment, ...]:
    """The segment in parts of at most `columns` values."""
    if segment.size <= columns:
        return (segment,)
    ends = range(segment.offset, segment.offset + segment.size, columns)
    stop = segment.offset + segment.size
    return tuple(Segment(offset=at, size=min(columns, stop - at), vector=segment.vector) for at in ends)


def elementwise_unsupported(rows: int, features: int) -> str | None:
    """Why rows of this length cannot be cut, or None where they can. Empty arrays need no kernel and are fine."""
    if not rows * features:
        return None
    if features < LANES:
        return f"rows have {features} values, a warpgroup shares at least {LANES}"
    if features > MAX_ELEMENTS:
        return f"rows have {features} values, the kernels count at most {MAX_ELEMENTS}"
    return None
