"""The backward kernel in which several warpgroups of a block share each row.

TMA copies rows to a ring in shared memory. The warpgroups synchronise once per row, on a barrier with two purposes: it
publishes the row's sums, and it shows that all warpgroups have finished the row before, whose stage can be filled
again.

To subtract a row's mean with one barrier, each warp first centres its own line of the row (a quarter of a warpgroup's
part). The lines are then combined as Chan, Golub and LeVeque combine samples, which avoids the cancellation of E[x**2]
- E[x]**2. Source: "Updating formulae and a pairwise algorithm for computing sample variances", 1979. For 16-bit values
it is enough to subtract the row's first value: their deviations are not small against their distance from it, so plain
sums over the row are accurate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops._norms.norm import Norm, RowScalars, weigh
from pallas_kernels.ops._norms.operands import BackwardOperands
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.random import Words, mixed_words
from pallas_kernels.primitives.rows import (
    WARPS,
    RowValues,
    Segment,
    WarpSegment,
    line_sums,
    load_row,
    map_row,
    over_lines,
    split_warp_row,
    store_row,
    to_float32,
    zeros_row,
)
from pallas_kernels.primitives.sharing import without_values

# Every thread reads back only what it stored itself, or what an explicit barrier protects; no sum crosses warps.
COMPILER_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True, reduction_scratch_bytes=512)


def shared_row_kernel(operands: BackwardOperands) -> dict[str, jax.Array]:
    """Returns the rows of the gradients and each block's column sums, by name."""
    rows, features, config = operands.rows, operands.features, operands.config
    segments = split_warp_row(features, operands.dtype.itemsize, warpgroups=config.warpgroups)
    if segments is None:
        raise ValueError(f"{features} features do not divide over {config.warpgroups} warpgroups; use fewer.")
    row_sums = RowSums(
        norm=operands.norm,
        dtype=operands.dtype,
        features=features,
        lines=config.warpgroups * WARPS,
        keeps_row=config.keeps_row,
    )
    parts = (config.warpgroups, WARPS, row_sums.line)
    inputs, out_types, streams = operands.inputs, operands.out_types(parts), len(operands.streams)
    scratch = {
        "ring": plgpu.SMEM((config.steps, streams, *parts), operands.dtype),
        **({} if operands.scale is None else {"gain": plgpu.SMEM(parts, operands.scale.dtype)}),
        "line_sums": plgpu.SMEM((2, row_sums.kinds, row_sums.lines), jnp.float32),  # no warpgroup is two rows ahead
        "arrived": plgpu.Barrier(num_arrivals=streams, num_barriers=config.steps),
        "summed": plgpu.Barrier(num_arrivals=config.warpgroups),
    }
    names = (*inputs, *out_types, *scratch)

    known = without_values(operands)

    def kernel(*references):
        _rows_of_warpgroup(dict(zip(names, references, strict=True)), known, row_sums, segments)

    def seen_in_parts(name, array):
        if name == "words":
            return array
        return array.reshape(parts) if name == "scale" else array.reshape(rows, *parts)

    outputs = settings.kernel(
        kernel,
        out_type=tuple(out_types.values()),
        grid=(operands.blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        compiler_params=COMPILER_PARAMS,
        kernel_name=operands.kernel_name,
    )(*(seen_in_parts(name, array) for name, array in inputs.items()))
    return {
        name: output.reshape(*output.shape[: -len(parts)], features)
        for name, output in zip(out_types, outputs, strict=True)
    }


def _rows_of_warpgroup(
    refs: dict[str, Any], operands: BackwardOperands, row_sums: RowSums, segments: tuple[WarpSegment, ...]
) -> None:
    """Differentiates a warpgroup's part of the block's rows in order, with the column sums in registers."""
    block, group = lax.axis_index("block"), lax.axis_index("warpgroup")
    trips = (operands.rows - block + operands.blocks - 1) // operands.blocks
    words = mixed_words(refs["words"]) if "words" in refs else None
    ring = RowRing(operands=operands, refs=refs, block=block, group=group, trips=trips)
    ring.fill()
    if "gain" in refs:  # each thread reads back only what it stores here
        store_row(refs["gain"].at[group], load_row(refs["scale"].at[group], segments), segments)
    part = RowPart(ring=ring, row_sums=row_sums, segments=segments, words=words)

    def step(i, sums):
        row = part.publish(i)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["summed"])
        plgpu.barrier_wait(refs["summed"])
        if row_sums.keeps_row:
            ring.refill(i)
        else:
            ring.refill(i - 1)
            # A zero that the compiler cannot see, so that it does not keep the values of the first read in registers.
            row = part.load(i, lax.optimization_barrier(jnp.int32(0)))
        return part.finish(i, row, sums)

    sums = lax.fori_loop(0, trips, step, {name: zeros_row(segments) for name in operands.sums})
    for name, values in sums.items():
        store_row(operands.sums_at(refs, block, name).at[group], values, segments)


@dataclass(frozen=True, kw_only=True)
class RowRing:
    """The block's rows in shared memory: row number i of its `trips`, of every stream, is in stage i % steps.

    The first warpgroup issues the copies.
    """

    operands: BackwardOperands
    refs: dict[str, Any]
    block: jax.Array
    group: jax.Array
    trips: jax.Array

    def index(self, i: jax.Array) -> jax.Array:
        """Returns the index of the block's row number i among all rows."""
        return i * self.operands.blocks + self.block

    def stage(self, i: jax.Array) -> jax.Array:
        """Returns the stage of the block's row number i."""
        return lax.rem(i, self.operands.config.steps)

    def fill(self) -> None:
        """Starts the TMA copies of the first rows."""

        @pl.when(self.group == 0)
        def _():
            for i in range(self.operands.config.steps):
                pl.when(i < self.trips)(lambda i=i: self._fetch(jnp.int32(i)))

    def refill(self, free: jax.Array) -> None:
        """Starts the copy of the row `steps` after `free` into the stage of `free`, which is not read again."""
        steps = self.operands.config.steps

        @pl.when((self.group == 0) & (free >= 0) & (free + steps < self.trips))
        def _():
            self._fetch(free + steps)

    def wait(self, i: jax.Array) -> None:
        """Waits until row number i has arrived."""
        plgpu.barrier_wait(self.refs["arrived"].at[self.stage(i)])

    def _fetch(self, i: jax.Array) -> None:
        stage = self.stage(i)
        for s, name in enumerate(("total", "dy", "dtotal_in")[: len(self.operands.streams)]):
            plgpu.copy_gmem_to_smem(
                self.refs[name].at[self.index(i)],
                self.refs["ring"].at[stage, s],
                self.refs["arrived"].at[stage],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )


class LoadedRow(NamedTuple):
    """A warpgroup's part of a row.

    value: the row to normalise in float32, less the row's first value if shifted. weighted: dy times scale, float32.
    cotangent: of the sum, in its own dtype, or None.
    """

    value: RowValues
    dy: RowValues
    weighted: RowValues
    cotangent: RowValues | None


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """Computes a warpgroup's part of each row. words: the dropout's mixed key."""

    ring: RowRing
    row_sums: RowSums
    segments: tuple[WarpSegment, ...]
    words: Words | None

    def load(self, i: jax.Array, first: jax.Array | int = 0) -> LoadedRow:
        """Reads row number i. first: 0, possibly as a value that the compiler does not know."""
        refs, group, segments = self.ring.refs, self.ring.group, self.segments
        ring, stage = refs["ring"], self.ring.stage(i) + first
        value, dy = (to_float32(load_row(ring.at[stage, s, group], segments)) for s in range(2))
        if self.row_sums.is_shifted:
            shift = ring[stage, 0, 0, 0, 0].astype(jnp.float32)
            value = map_row(lambda v: v - shift, value)
        weighted = weigh(dy, load_row(refs["gain"].at[group], segments) if "gain" in refs else None)
        has_cotangent = "dtotal_in" in refs
        return LoadedRow(value, dy, weighted, load_row(ring.at[stage, 2, group], segments) if has_cotangent else None)

    def publish(self, i: jax.Array) -> LoadedRow:
        """Waits for a row, reads it, and writes the sums of its lines to shared memory."""
        self.ring.wait(i)
        row = self.load(i)
        for kind, values in enumerate(self.row_sums.of_lines(row.value, row.weighted, self.segments)):
            self.ring.refs["line_sums"][lax.rem(i, 2), kind, pl.ds(self.ring.group * WARPS, WARPS)] = values
        return row

    def finish(self, i: jax.Array, row: LoadedRow, sums: dict[str, RowValues]) -> dict[str, RowValues]:
        """Writes the row's gradient from the sums of all lines; returns the column sums with the row added."""
        refs, group, segments, operands = self.ring.refs, self.ring.group, self.segments, self.ring.operands
        scalars = self.row_sums.scalars(refs["line_sums"].at[lax.rem(i, 2)])
        gradient, sums = scalars.finish(row.value, row.dy, row.weighted, sums)
        if row.cotangent is not None:
            gradient = map_row(jnp.add, gradient, to_float32(row.cotangent))
        index = self.ring.index(i)
        store_row(refs["dtotal"].at[index, group], gradient, segments)
        if self.words is not None:
            columns = tuple(s.row_columns(jnp.uint32, group=group, line=self.row_sums.line) for s in segments)
            dropped = operands.norm.drop(gradient, self.words, index, columns, operands.features)
            store_row(refs["dx"].at[index, group], dropped, segments)
        return sums


@dataclass(frozen=True, kw_only=True)
class RowSums:
    """The sums that each warp computes over its line, and the scalars of the row that follow from them.

    lines: the number of lines that a row of `features` values of `dtype` is cut into. keeps_row: whether the row's
    values stay in registers between its two passes.
    """

    norm: Norm
    dtype: Any
    features: int
    lines: int
    keeps_row: bool

    @property
    def line(self) -> int:
        """Columns in a line."""
        return self.features // self.lines

    @property
    def is_shifted(self) -> bool:
        """Whether the row's first value is subtracted from all values, so that lines need no centring."""
        return self.norm.centered and self.dtype.itemsize < 4

    @property
    def has_remainders(self) -> bool:
        """Whether lines also sum their centred values, a sum that rounding keeps from being zero."""
        return self.norm.mean_passes(self.dtype) == 2

    @property
    def kinds(self) -> int:
        """The number of sums for each line."""
        return 2 + 2 * self.norm.centered + self.has_remainders

    def of_lines(self, value: RowValues, weighted: RowValues, segments: Sequence[Segment]) -> tuple[jax.Array, ...]:
        """Returns each line's sums of squares and products and, for centred rows, those that give the mean; (4,) each.

        A warpgroup's four lines hold the normalised row and the weighted dy. A line that is not shifted has its own
        mean subtracted first, and returns that mean in place of the sum of shifted values.
        """
        add = partial(line_sums, segments=segments)
        if not self.norm.centered:
            return add(map_row(jnp.square, value)), add(map_row(jnp.multiply, value, weighted))
        if self.is_shifted:
            mean = add(value)
        else:
            mean = add(value) * (1.0 / self.line)
            value = map_row(jnp.subtract, value, over_lines(mean, segments))
        return (
            add(map_row(jnp.square, value)),
            add(map_row(jnp.multiply, value, weighted)),
            mean,
            add(weighted),
            *((add(value),) if self.has_remainders else ()),
        )

    def scalars(self, ref) -> RowScalars:
        """Computes the scalars of a row from the sums of its lines in `ref`, a (kinds, lines) reference."""
        if self.norm.centered and not self.is_shifted:
            return self._of_centered_lines(ref)

        def sum_of(kind):
            if not self.norm.centered and not self.keeps_row:  # with two sums, adding takes less time than shuffles
                return sum(ref[kind, at] for at in range(self.lines))
            return jnp.sum(plgpu.load(ref.at[kind], layout=_lanes_of_lines(self.lines), optimized=False))

        if self.is_shifted:
            return self._of_shifted_sums(sum_of)
        return RowScalars.of_sums(self.features, self.norm.epsilon, squares=sum_of(0), products=sum_of(1))

    def _of_shifted_sums(self, sum_of) -> RowScalars:
        mean, weight = sum_of(2) * (1.0 / self.features), sum_of(3)
        squares = jnp.maximum(sum_of(0) - self.features * mean * mean, jnp.float32(0))
        return RowScalars.of_sums(
            self.features,
            self.norm.epsilon,
            squares=squares,
            products=sum_of(1) - mean * weight,
            means=(mean,),
            weighted=weight,
            is_folded=True,
        )

    def _of_centered_lines(self, ref) -> RowScalars:
        def read(kind):
            return [ref[kind, at] for at in range(self.lines)]

        squares, products, line_means, weights = sum(read(0)), sum(read(1)), read(2), read(3)
        means = [sum(line_means) * (1.0 / self.lines)]
        offsets = [m - means[0] for m in line_means]
        if self.has_remainders:
            remainders = read(4)
            means.append(sum(offsets) * (1.0 / self.lines) + sum(remainders) * (1.0 / self.features))
            offsets = [o - means[1] for o in offsets]
            squares += 2 * sum(o * r for o, r in zip(offsets, remainders, strict=True))
        squares += self.line * sum(o * o for o in offsets)
        products += sum(o * w for o, w in zip(offsets, weights, strict=True))
        return RowScalars.of_sums(
            self.features, self.norm.epsilon, squares=squares, products=products, means=means, weighted=sum(weights)
        )


def _lanes_of_lines(lines: int) -> plgpu.Layout | Any:
    """Returns a layout with one line's sum in each lane, the same in every warp, so that a warp's shuffles add them."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((lines,), (1,))),
        warp_dims=(plgpu.Replicated(times=WARPS),),
        lane_dims=(plgpu.Replicated(times=32 // lines), -2),
        vector_dim=-1,
    )
