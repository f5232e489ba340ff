"""How the table's gradient is computed, and how its kernels split their work."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.primitives.rows import THREADS, Segment, split_row


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """How the two kernels split their work.

    section: entries of the sorted list that one block adds up, at most.
    columns: the most columns of a block.
    rows: rows of the table that a block writes.
    bytes_at_once: bytes that a block has in flight.
    """

    section: int = 32
    columns: int = 1024
    rows: int = 1
    bytes_at_once: int = 32768


_MANY_ROWS = 8192
"""From so many on, a block writes several: a GPU starts only 1.6 blocks a nanosecond."""


def default_config(rows: int) -> EmbeddingConfig:
    """Returns the configuration for a table of so many rows."""
    return EmbeddingConfig(rows=4 if rows >= _MANY_ROWS else 1)


@dataclass(frozen=True, kw_only=True)
class Strips:
    """Cuts rows of `features` values into strips of `width` columns; the last one may overlap the one before."""

    features: int
    width: int
    segments: tuple[Segment, ...]

    @classmethod
    def make(cls, features: int, itemsize: int, widest: int) -> Strips:
        """Makes strips of at most `widest` columns, a multiple of 128, of values of `itemsize` bytes."""
        if features <= widest:
            return cls(features=features, width=features, segments=split_row(features, itemsize))
        strips = -(-features // widest)
        width = -(-features // (strips * THREADS)) * THREADS
        return cls(features=features, width=width, segments=split_row(width, itemsize, stride=features))

    @property
    def count(self) -> int:
        """The number of strips."""
        return -(-self.features // self.width)

    def columns(self, strip: jax.Array) -> pl.Slice:
        """The columns of a strip, in a kernel: in units of accesses, so that the compiler sees their alignment."""
        vector, last = self.segments[0].vector, self.features - self.width
        start = jnp.minimum(strip * (self.width // vector), last // vector) * vector if last else 0
        return pl.ds(start, self.width)

    def rows_at_once(self, itemsize: int, most_bytes: int) -> int:
        """The rows of values of `itemsize` bytes that a block has in flight: 1, 4 or 16."""
        return next(n for n in (16, 4, 1) if n == 1 or n * self.width * itemsize <= most_bytes)


_FEWEST_VALUES = 2**18
"""The fewest values of the rows for which the kernels' launches, of 10 µs in all, are worth it."""
_PRODUCT_ROWS = {2: 256, 4: 16}
"""The most rows of a table whose gradient is a product, by the bytes of a value of dy: see TUNING.md."""


def is_product(rows: int, itemsize: int) -> bool:
    """Returns whether the gradient of a table of so many rows is a product of one-hot indices with dy."""
    return rows <= _PRODUCT_ROWS[itemsize]


def is_too_narrow(table: tuple[int, ...], itemsize: int) -> bool:
    """Returns whether a table has too few features for the kernels, and too many rows for a product."""
    rows, features = table
    return features < THREADS and not is_product(rows, itemsize)


def is_preferred(entries: int, table: tuple[int, ...], itemsize: int) -> bool:
    """Returns whether to compute the gradient by the kernels or a product, in place of XLA's scatter-add.

    XLA adds float32 by atomics that never try again. Only equal indices slow them down, which few rows must have.

    table: (rows, features). itemsize: bytes of a value of dy.
    """
    rows, features = table
    is_slow = itemsize == 2 or (itemsize == 4 and is_product(rows, itemsize))
    return is_slow and entries * features >= _FEWEST_VALUES and not is_too_narrow(table, itemsize)
