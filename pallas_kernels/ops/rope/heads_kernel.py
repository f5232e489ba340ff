"""The kernel that normalises and rotates heads, forward and backward.

A tile is several rows of one head, so that a launch takes any number of heads, and a tile's angles serve all heads of
its rows. A warp has whole rows of the tile, and each thread both members of its pairs, so that the sums over a head are
shuffles. Blocks are persistent. Each has a strip of neighbouring heads, reads the cosines and sines of a tile's rows
once for all of them, and keeps the sums over its rows in registers.
"""

from __future__ import annotations

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

Refs = dict[str, Any]
Sums = dict[str, list[Members]]
"""Sums over rows, by kind: of "scale" over all heads of a strip, of "bias" for each head."""
Angles = tuple[Members, Members]
"""Cosines and sines, each for the first and the second members of pairs."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The static parameters of an array, see `heads.HeadArray`. index: its place in the launch. heads: their number."""

    index: int
    heads: int
    epsilon: float | None
    rounds_before_scale: bool
    is_rotated: bool
    has_scale: bool
    has_bias: bool

    @property
    def has_result(self) -> bool:
        """Whether the launch changes the heads; else it only sums them."""
        return self.is_rotated or self.epsilon is not None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The static parameters of a launch.

    size: columns of a head. every: of so many heads the first is rotated. rows: at least those of a tile. period: rows
    of cosines and sines, which repeat.
    tile: of each member of a head's pairs.
    strip: heads of a strip, which divides each part's. at_once: those that are read together; all of a strip with sums
    for biases. groups: of rows, with a block for each strip.
    """

    size: int
    every: int
    rows: int
    period: int
    pairs: Pairs
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

    def strips_of(self, part: Part) -> range:
        """The strips of a part."""
        first = sum(other.heads for other in self.parts[: part.index])
        return range(first // self.strip, (first + part.heads) // self.strip)

    @property
    def sum_lines(self) -> dict[tuple[int, str], range]:
        """The lines of a group's sums, by part and kind: "bias" has one for each head, "scale" one for each strip."""
        lines: dict[tuple[int, str], range] = {}
        end = 0
        for part in self.parts if self.is_backward else ():
            counts = {"bias": part.heads * part.has_bias, "scale": part.heads // self.strip * part.has_scale}
            for kind, count in counts.items():
                if count:
                    lines[part.index, kind] = range(end, end + count)
                    end += count
        return lines


def run_block(plan: Plan, refs: Refs) -> None:
    """Computes a group's rows of one strip."""
    block = lax.axis_index("block")
    group, strip = lax.div(block, plan.strips), lax.rem(block, plan.strips)
    for part in plan.parts:
        strips = plan.strips_of(part)
        run = _Strip(plan=plan, part=part, refs=refs, group=group, strip=strip - strips.start).run
        pl.when((strip >= strips.start) & (strip < strips.stop))(run)


@dataclass(frozen=True, kw_only=True)
class _Strip:
    """One block's work: a group of rows of one strip of heads."""

    plan: Plan
    part: Part
    refs: Refs
    group: jax.Array
    strip: jax.Array

    def run(self) -> None:
        plan, part, tile = self.plan, self.part, self.plan.tile

        def step(i, sums: Sums) -> Sums:
            start = (i * plan.groups + self.group) * tile.rows
            rows = pl.ds(jnp.minimum(start, plan.rows - tile.rows), tile.rows)
            angles = self._angles(rows) if part.is_rotated else None

            def heads_step(k, sums: Sums) -> Sums:
                first = self.strip * plan.strip + k * plan.at_once
                return self._heads([first + j for j in range(plan.at_once)], rows, start, angles, sums)

            return lax.fori_loop(0, plan.strip // plan.at_once, heads_step, sums)

        units = pl.cdiv(plan.rows, tile.rows)
        trips = (units - self.group + plan.groups - 1) // plan.groups
        counts = {kind: 1 if kind == "scale" else plan.strip for i, kind in plan.sum_lines if i == part.index}
        zero = plgpu.layout_cast(jnp.zeros((tile.rows, tile.half), jnp.float32), tile.layout)
        sums = lax.fori_loop(0, trips, step, {kind: [(zero, zero)] * count for kind, count in counts.items()})
        for kind, values in sums.items():
            first = plan.sum_lines[part.index, kind].start + self.strip * counts[kind]
            for j, value in enumerate(values):
                self._write_sum(first + j, value)

    def _heads(self, heads: list[Any], rows: pl.Slice, start: Any, angles: Angles | None, sums: Sums) -> Sums:
        """Writes the results of a few heads, and returns the sums with them added."""
        plan, tile = self.plan, self.plan.tile
        sources = [self.refs[name] for kind in ("array", "product") if (name := self._name(kind)) in self.refs]
        loaded = [[plan.pairs.load(source, rows, head, tile) for source in sources] for head in heads]
        gain = self._gain() if self.part.has_scale else None
        for j, (head, values) in enumerate(zip(heads, loaded, strict=True)):
            compute = self._gradient if plan.is_backward else self._result
            own = self._own_angles(head, angles)
            result, scale_terms = compute([plan.pairs.members(value) for value in values], gain, own)
            if self.part.has_result:
                rounded = _cast(result, plan.pairs.dtype)
                plan.pairs.store(self.refs[self._name("result")], rows, head, rounded)
                result = _cast(rounded, jnp.float32)
            sums = self._add(sums, {"scale": (0, scale_terms), "bias": (j, result)}, rows, start)
        return sums

    def _name(self, kind: str) -> str:
        return f"{kind} {self.part.index}"

    def _gain(self) -> Members:
        ref, tile = self.refs[self._name("scale")], self.plan.tile
        first, second = (_over_rows(ref.at[member], tile).astype(jnp.float32) for member in range(2))
        return first, second

    def _angles(self, rows: pl.Slice) -> Angles:
        """Reads cosines and sines of the rows, of the transposed rotation if backward."""
        tile, own = self.plan.tile, rows
        if self.plan.period < self.plan.rows:
            own = pl.ds(lax.rem(rows.start, self.plan.period), tile.rows)

        def read(table: Any) -> Members:
            members = [
                plgpu.load(table.at[own, m], layout=tile.layout, optimized=False).astype(jnp.float32)
                for m in range(table.shape[1])
            ]
            return members[0], members[-1]

        cosines, sines = read(self.refs["cos"]), read(self.refs["sin"])
        return cosines, (-sines[1], -sines[0]) if self.plan.is_backward else sines

    def _own_angles(self, head: Any, angles: Angles | None) -> Angles | None:
        """Returns the angles of a head: none where it is not rotated."""
        if angles is None or self.plan.every == 1:
            return angles
        place = lax.broadcast_in_dim(lax.rem(head, self.plan.every), (self.plan.tile.rows, self.plan.tile.half), ())
        (first, second), (one, two) = (
            [jnp.where(place == 0, each, jnp.float32(other)) for each in members]
            for members, other in zip(angles, (1, 0), strict=True)
        )
        return (first, second), (one, two)

    def _result(self, values: list[Members], gain: Members | None, angles: Angles | None) -> tuple[Members, None]:
        """Returns the normalised and rotated heads."""
        (product,) = values
        if self.part.epsilon is not None:
            inverse = _over_columns(self._inverse(product, self.part.epsilon), self.plan.tile)
            product = _times(product, inverse)
            if self.part.rounds_before_scale:
                product = _cast(_cast(product, self.plan.pairs.dtype), jnp.float32)
            product = _scaled(product, gain)
        return _rotated(product, angles), None

    def _gradient(
        self, values: list[Members], gain: Members | None, angles: Angles | None
    ) -> tuple[Members, Members | None]:
        """Returns the products' gradients, and each row's terms of the scale's gradient."""
        cotangent = _rotated(values[0], angles)
        if self.part.epsilon is None:
            return cotangent, None
        product = values[1]
        inverse = self._inverse(product, self.part.epsilon)
        over_norm = _times(cotangent, _over_columns(inverse, self.plan.tile))
        weighted = _scaled(over_norm, gain)
        slope = _over_columns(inverse * inverse * self._mean(weighted, product), self.plan.tile)
        first, second = (w - p * slope for w, p in zip(weighted, product, strict=True))
        return (first, second), (over_norm[0] * product[0], over_norm[1] * product[1])

    def _inverse(self, product: Members, epsilon: float) -> jax.Array:
        """Returns 1 / sqrt(mean(product**2) + epsilon) of each row's head."""
        return lax.rsqrt(self._mean(product, product) + epsilon)

    def _mean(self, a: Members, b: Members) -> jax.Array:
        """Returns the mean of a * b over each row's head."""
        return jnp.sum(a[0] * b[0] + a[1] * b[1], axis=1) * (1.0 / self.plan.size)

    def _add(self, sums: Sums, terms: dict[str, Any], rows: pl.Slice, start: jax.Array) -> Sums:
        """Adds the summands of rows from `start` on; the last tile may begin early, in the one before."""
        added = dict(sums)
        tile = self.plan.tile
        for kind in sums:
            place, values = terms[kind]
            if self.plan.rows % tile.rows:
                row = plgpu.broadcasted_iota(jnp.int32, (tile.rows, tile.half), 0, layout=tile.layout) + rows.start
                values = tuple(jnp.where(row >= start, value, jnp.float32(0)) for value in values)
            total = (sums[kind][place][0] + values[0], sums[kind][place][1] + values[1])
            added[kind] = [*sums[kind][:place], total, *sums[kind][place + 1 :]]
        return added

    def _write_sum(self, line: jax.Array, value: Members) -> None:
        """Adds the rows of a tile, and writes the sums over a group's rows."""
        lines, tile = self.refs["lines"], self.plan.tile
        for member in range(2):
            lines[member] = value[member]
        plgpu.commit_smem()
        for member in range(2):
            row_values = [
                plgpu.load(lines.at[member, row], layout=tile.layout.reduce(0), optimized=False)
                for row in range(tile.rows)
            ]
            store(self.refs["sums"].at[self.group, line, member], sum(row_values[1:], start=row_values[0]))
        plgpu.commit_smem()  # the next sums take the same place


def _cast(members: Members, dtype: DTypeLike) -> Members:
    return members[0].astype(dtype), members[1].astype(dtype)


def _over_rows(ref: Any, tile: HeadTile) -> jax.Array:
    """Reads one value a column, the same for all rows of a tile."""
    values = plgpu.load(ref, layout=tile.layout.reduce(0), optimized=False)
    return plgpu.layout_cast(lax.broadcast_in_dim(values, (tile.rows, tile.half), (1,)), tile.layout)


def _over_columns(values: jax.Array, tile: HeadTile) -> jax.Array:
    """Repeats one value a row over the columns of a tile."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, (tile.rows, tile.half), (0,)), tile.layout)


def _times(members: Members, factor: jax.Array) -> Members:
    return members[0] * factor, members[1] * factor


def _scaled(members: Members, gain: Members | None) -> Members:
    return members if gain is None else (members[0] * gain[0], members[1] * gain[1])


def _rotated(members: Members, angles: Angles | None) -> Members:
    if angles is None:
        return members
    (first, second), (cosines, sines) = members, angles
    return first * cosines[0] - second * sines[0], second * cosines[1] + first * sines[1]
