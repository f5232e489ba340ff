"""The kernel that normalises and rotates heads, forward and backward.

A tile is several rows of one head, so that a launch takes any number of heads, and a tile's angles serve all heads of
its rows. A warp has whole rows of the tile, and each thread both members of its pairs, so that the sums over a head are
shuffles. Each block has a strip of neighbouring heads and reads the cosines and sines of a tile's rows once for all of
them. A block that sums over rows is persistent, and keeps the sum in registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.ops.rope.pairs import HeadTile, Members, Pairs
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.rows import map_row, to_float32

Angles = tuple[Members, Members]
"""Cosines and sines, each for the first and the second members of pairs."""


@dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """The RMS norm of each head. rounds_before_scale: whether heads are rounded before the scale."""

    epsilon: float
    rounds_before_scale: bool = False


@dataclass(frozen=True, kw_only=True)
class Part:
    """The static parameters of an array. heads: their number. has_sum: whether the scale's gradient is summed."""

    heads: int
    norm: HeadNorm | None
    has_sum: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The static parameters of a launch.

    size: columns of a head. every: of so many heads the first is rotated. rows: at least those of a tile. period: rows
    of cosines and sines, which repeat. tables: the pairs of cosines and of sines, None with one value a pair.
    tile: of each member of a head's pairs.
    strip: heads of a strip, which divides each part's. at_once: those that are read together.
    groups: of rows, with a block for each strip.
    """

    size: int
    every: int
    rows: int
    period: int
    pairs: Pairs
    tables: tuple[Pairs | None, ...]
    tile: HeadTile
    is_backward: bool
    parts: tuple[Part, ...]
    strip: int
    at_once: int
    groups: int

    @property
    def strips(self) -> int:
        """The number of strips of all parts."""
        return sum(part.heads for part in self.parts) // self.strip


def run_block(plan: Plan, refs: Mapping[str, Any], results: Sequence[Any], others: Sequence[Any]) -> None:
    """Computes a group's rows of one strip.

    refs: arrays, products and scales of each part, each None where there is none, and the tables. others: the sums of
    the parts that have them, and scratch to add rows.
    """
    block = lax.axis_index("block")
    group, strip = lax.div(block, plan.strips), lax.rem(block, plan.strips)
    *sums, lines = others if others else (None,)
    found, first = iter(sums), 0
    for i, part in enumerate(plan.parts):
        end = first + part.heads // plan.strip
        run = _Strip(
            plan=plan,
            part=part,
            sources=[own for own in (refs["array"][i], refs["product"][i]) if own is not None],
            scale=refs["scale"][i],
            tables=refs["tables"],
            result=results[i],
            sums=next(found) if part.has_sum else None,
            lines=lines,
            group=group,
            strip=strip - first,
        ).run
        pl.when((strip >= first) & (strip < end))(run)
        first = end


@dataclass(frozen=True, kw_only=True)
class _Strip:
    """One block's work: a group of rows of one strip of heads. sources: the heads, and backward their products."""

    plan: Plan
    part: Part
    sources: Sequence[Any]
    scale: Any
    tables: Any
    result: Any
    sums: Any
    lines: Any
    group: jax.Array
    strip: jax.Array

    def run(self) -> None:
        plan, tile = self.plan, self.plan.tile

        def step(i, total: Members | None) -> Members | None:
            start = (i * plan.groups + self.group) * tile.rows
            rows = pl.ds(jnp.minimum(start, plan.rows - tile.rows), tile.rows)
            angles = None if self.tables is None else self._angles(rows)

            def heads_step(k, total: Members | None) -> Members | None:
                first = self.strip * plan.strip + k * plan.at_once
                return self._heads([first + j for j in range(plan.at_once)], rows, start, angles, total)

            return lax.fori_loop(0, plan.strip // plan.at_once, heads_step, total)

        units = pl.cdiv(plan.rows, tile.rows)
        trips = (units - self.group + plan.groups - 1) // plan.groups
        zero = plgpu.layout_cast(jnp.zeros((tile.rows, tile.half), jnp.float32), tile.layout)
        total = lax.fori_loop(0, trips, step, (zero, zero) if self.part.has_sum else None)
        if total is not None:
            self._write_sum(total)

    def _heads(self, heads: list[Any], rows: pl.Slice, start: Any, angles: Angles | None, total: Members | None):
        """Writes the results of a few heads, and returns the sum with theirs added."""
        pairs, tile = self.plan.pairs, self.plan.tile
        loaded = [[pairs.load(source, rows, head, tile) for source in self.sources] for head in heads]
        gain = None if self.scale is None else _gain(self.scale, tile)
        for head, values in zip(heads, loaded, strict=True):
            compute = self._gradient if self.plan.is_backward else self._result
            own = self._own_angles(head, angles)
            result, terms = compute([pairs.members(value) for value in values], gain, own)
            pairs.store(self.result, rows, head, _cast(result, pairs.dtype))
            total = None if total is None or terms is None else self._add(total, terms, rows, start)
        return total

    def _angles(self, rows: pl.Slice) -> Angles:
        """Reads cosines and sines of the rows, of the transposed rotation if backward."""
        if self.plan.period < self.plan.rows:
            rows = pl.ds(lax.rem(rows.start, self.plan.period), self.plan.tile.rows)

        def read(table: Any, pairs: Pairs | None) -> Members:
            if pairs is not None:
                return pairs.members(pairs.load(table, rows, 0, self.plan.tile))
            value = plgpu.load(table.at[rows, 0], layout=self.plan.tile.layout, optimized=False).astype(jnp.float32)
            return value, value

        cosines, sines = map(read, self.tables, self.plan.tables)
        return cosines, (-sines[1], -sines[0]) if self.plan.is_backward else sines

    def _own_angles(self, head: Any, angles: Angles | None) -> Angles | None:
        """Returns the angles of a head: none where it is not rotated."""
        if angles is None or self.plan.every == 1:
            return angles
        place = lax.broadcast_in_dim(lax.rem(head, self.plan.every), (self.plan.tile.rows, self.plan.tile.half), ())
        cosines, sines = (
            map_row(lambda each, other=other: jnp.where(place == 0, each, jnp.float32(other)), members)
            for members, other in zip(angles, (1, 0), strict=True)
        )
        return cosines, sines

    def _result(self, values: list[Members], gain: Members | None, angles: Angles | None) -> tuple[Members, None]:
        """Returns the normalised and rotated heads."""
        (product,), norm = values, self.part.norm
        if norm is not None:
            inverse = _over_columns(self._inverse(product, norm), self.plan.tile)
            product = map_row(lambda value: value * inverse, product)
            if norm.rounds_before_scale:
                product = to_float32(_cast(product, self.plan.pairs.dtype))
            product = _scaled(product, gain)
        return _rotated(product, angles), None

    def _gradient(
        self, values: list[Members], gain: Members | None, angles: Angles | None
    ) -> tuple[Members, Members | None]:
        """Returns the products' gradients, and each row's terms of the scale's gradient."""
        cotangent = _rotated(values[0], angles)
        if self.part.norm is None:
            return cotangent, None
        product = values[1]
        inverse = self._inverse(product, self.part.norm)
        over_heads = _over_columns(inverse, self.plan.tile)
        over_norm = map_row(lambda value: value * over_heads, cotangent)
        weighted = _scaled(over_norm, gain)
        slope = _over_columns(inverse * inverse * self._mean(weighted, product), self.plan.tile)
        gradient = map_row(lambda w, p: w - p * slope, weighted, product)
        return gradient, map_row(jnp.multiply, over_norm, product)

    def _inverse(self, product: Members, norm: HeadNorm) -> jax.Array:
        """Returns 1 / sqrt(mean(product**2) + epsilon) of each row's head."""
        return lax.rsqrt(self._mean(product, product) + norm.epsilon)

    def _mean(self, a: Members, b: Members) -> jax.Array:
        """Returns the mean of a * b over each row's head."""
        return jnp.sum(a[0] * b[0] + a[1] * b[1], axis=1) * (1.0 / self.plan.size)

    def _add(self, total: Members, terms: Members, rows: pl.Slice, start: jax.Array) -> Members:
        """Adds the terms of rows from `start` on; the last tile may begin early, in the one before."""
        tile = self.plan.tile
        if self.plan.rows % tile.rows:
            row = plgpu.broadcasted_iota(jnp.int32, (tile.rows, tile.half), 0, layout=tile.layout) + rows.start
            terms = map_row(lambda term: jnp.where(row >= start, term, jnp.float32(0)), terms)
        return map_row(jnp.add, total, terms)

    def _write_sum(self, total: Members) -> None:
        """Adds the rows of a tile, and writes the sum over a group's rows."""
        tile = self.plan.tile
        for member in range(2):
            self.lines[member] = total[member]
        plgpu.commit_smem()
        for member in range(2):
            first, *others = [
                plgpu.load(self.lines.at[member, row], layout=tile.layout.reduce(0), optimized=False)
                for row in range(tile.rows)
            ]
            store(self.sums.at[self.group, self.strip, member], sum(others, start=first))


def _cast(members: Members, dtype: DTypeLike) -> Members:
    return map_row(lambda value: value.astype(dtype), members)


def _gain(scale: Any, tile: HeadTile) -> Members:
    """Reads a head's scale, the same for all rows of a tile."""

    def read(ref: Any) -> jax.Array:
        values = plgpu.load(ref, layout=tile.layout.reduce(0), optimized=False)
        wide = plgpu.layout_cast(lax.broadcast_in_dim(values, (tile.rows, tile.half), (1,)), tile.layout)
        return wide.astype(jnp.float32)

    return read(scale.at[0]), read(scale.at[1])


def _over_columns(values: jax.Array, tile: HeadTile) -> jax.Array:
    """Repeats one value a row over the columns of a tile."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, (tile.rows, tile.half), (0,)), tile.layout)


def _scaled(members: Members, gain: Members | None) -> Members:
    return members if gain is None else map_row(jnp.multiply, members, gain)


def _rotated(members: Members, angles: Angles | None) -> Members:
    if angles is None:
        return members
    (first, second), (cosines, sines) = members, angles
    return first * cosines[0] - second * sines[0], second * cosines[1] + first * sines[1]
