"""The backward kernel of rows too long for registers: a warpgroup walks along each, chunk by chunk, twice or, to take
its mean off, three times. Column sums are in memory, where each chunk's are read, added to and written again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops._norms.norm import RowScalars, weigh
from pallas_kernels.ops._norms.operands import BackwardOperands
from pallas_kernels.primitives.random import Words, mixed_words
from pallas_kernels.primitives.rows import (
    LANES,
    RowValues,
    Segment,
    load_row,
    map_row,
    row_sum,
    split_row,
    store_row,
    to_float32,
    zeros_row,
)

Segments = tuple[Segment, ...]


def chunked_rows(operands: BackwardOperands, block: jax.Array, refs: dict[str, Any]) -> None:
    """The block's rows, one after the other."""
    words = mixed_words(refs["words"]) if "words" in refs else None
    rows = ChunkedRows(operands=operands, refs=refs, block=block, words=words)
    rows.for_each_chunk(rows.clear_sums)

    @pl.loop(0, (operands.rows - block + operands.blocks - 1) // operands.blocks)
    def _(i):
        row = i * operands.blocks + block
        scalars = rows.scalars(row)
        rows.for_each_chunk(partial(rows.differentiate, row, scalars))


@dataclass(frozen=True, kw_only=True)
class ChunkedRows:
    """Rows as chunks of `config.chunk` columns and a tail, each given as columns of the row and segments in them."""

    operands: BackwardOperands
    refs: dict[str, Any]
    block: jax.Array
    words: Words | None

    @property
    def chunk(self) -> int:
        """Columns of a chunk: no segment of it repeats columns of another."""
        return min(self.operands.config.chunk, self.operands.features // LANES * LANES)

    @property
    def chunks(self) -> int:
        """How many are whole."""
        return self.operands.features // self.chunk

    @cached_property
    def segments(self) -> Segments:
        """Of a chunk."""
        return split_row(self.chunk, self.operands.dtype.itemsize, stride=self.operands.features)

    @cached_property
    def tail(self) -> Segments:
        """What the chunks leave, in the whole row."""
        features, before = self.operands.features, self.chunks * self.chunk
        return split_row(features - before, self.operands.dtype.itemsize, offset=before, stride=features)

    @property
    def whole(self) -> Any:
        """All columns, to which the tail's segments refer."""
        return pl.ds(0, self.operands.features)

    def columns(self, j: jax.Array) -> Any:
        """Of chunk j."""
        return pl.ds(j * self.chunk, self.chunk)

    def for_each_chunk(self, work: Callable[[Any, Segments], None]) -> None:
        """Calls work(columns, segments)."""

        @pl.loop(0, self.chunks)
        def _(j):
            work(self.columns(j), self.segments)

        if self.tail:
            work(self.whole, self.tail)

    def clear_sums(self, columns: Any, segments: Segments) -> None:
        """Column sums begin at zero."""
        for name in self.operands.sums:
            ref, at = self._sums_at(name, columns, segments)
            store_row(ref, zeros_row(at), at)

    def scalars(self, row: jax.Array) -> RowScalars:
        """What the gradient needs of the whole row."""
        means, total_weight = [], None
        norm, features = self.operands.norm, self.operands.features

        def centered_and_weighted(*part):
            value, _, weighted = self._load(row, *part)
            for mean in means:
                value = map_row(lambda v, mean=mean: v - mean, value)
            return value, weighted

        def squares_and_products(*part):
            value, weighted = centered_and_weighted(*part)
            return map_row(jnp.square, value), map_row(jnp.multiply, value, weighted)

        for _ in range(norm.mean_passes(self.operands.dtype)):
            total, total_weight = self._sums_over_row(2, centered_and_weighted)
            means.append(total * (1.0 / features))
        squares, products = self._sums_over_row(2, squares_and_products)
        return RowScalars.of_sums(
            features, norm.epsilon, squares=squares, products=products, means=means, weighted=total_weight
        )

    def differentiate(self, row: jax.Array, scalars: RowScalars, columns: Any, segments: Segments) -> None:
        """Writes the gradient of some columns, and adds to their sums."""
        refs, operands = self.refs, self.operands
        value, dy, weighted = self._load(row, columns, segments)
        centered = scalars.center(value)
        gradient = scalars.gradient(centered, weighted)
        if "dtotal_in" in refs:
            cotangent = load_row(refs["dtotal_in"].at[row, columns], segments)
            gradient = map_row(jnp.add, gradient, to_float32(cotangent))
        operands.store_gradient(refs, self.words, row, columns, segments, gradient)
        at = {name: self._sums_at(name, columns, segments) for name in operands.sums}
        before = {name: load_row(*at[name]) for name in operands.sums}
        for name, values in scalars.column_sums(centered, dy, before).items():
            store_row(at[name][0], values, at[name][1])

    def _load(self, row: jax.Array, columns: Any, segments: Segments) -> tuple[RowValues, RowValues, RowValues]:
        """Value, dy, and weighted dy."""
        refs = self.refs
        value, dy = (to_float32(load_row(refs[name].at[row, columns], segments)) for name in ("total", "dy"))
        gain = load_row(refs["scale"].at[columns], segments) if "scale" in refs else None
        return value, dy, weigh(dy, gain)

    def _sums_at(self, name: str, columns: Any, segments: Segments) -> tuple[Any, Segments]:
        """Where some columns' sums are: those of a ragged tail have places of their own."""
        ref = self.operands.sums_at(self.refs, self.block, name)
        if segments == self.tail:
            return ref, tuple(replace(s, offset=self.operands.features) if s.repeated else s for s in segments)
        return ref.at[columns], segments

    def _sums_over_row(self, count: int, part: Callable[[Any, Segments], tuple[RowValues, ...]]) -> list[jax.Array]:
        """The sums over the row of the `count` rows that `part` makes of some columns."""
        segments, tail = self.segments, self.tail

        def accumulate(j, sums):
            parts = part(self.columns(j), segments)
            return tuple(map_row(jnp.add, a, b) for a, b in zip(sums, parts, strict=True))

        sums = lax.fori_loop(0, self.chunks, accumulate, (zeros_row(segments),) * count)
        sums = [row_sum(values, segments) for values in sums]
        if not tail:
            return sums
        return [s + row_sum(p, tail) for s, p in zip(sums, part(self.whole, tail), strict=True)]
