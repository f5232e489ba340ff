"""The backward kernel in which several warpgroups of a block share each row.

Rows arrive in a ring of shared memory by TMA. Each row has one barrier between the warpgroups, which serves twice: it
carries the row's sums (`line_sums`), and whoever passes it knows that all have finished with the row before, so that
its place in the ring can be filled again. Overlapped, a row's first pass runs between the arrival at the barrier of the
row before and the wait there, so that no warp stands still at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops._norms.line_sums import LineSums
from pallas_kernels.ops._norms.norm import SHARED_ROW_PARAMS, weigh
from pallas_kernels.ops._norms.operands import BackwardOperands
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.random import Words, mixed_words
from pallas_kernels.primitives.rows import (
    WARPS,
    RowValues,
    WarpSegment,
    load_row,
    map_row,
    split_warp_row,
    store_row,
    to_float32,
    zeros_row,
)


def shared_row_kernel(operands: BackwardOperands) -> dict[str, jax.Array]:
    """Returns the gradients' rows and the blocks' column sums, by name."""
    rows, features, config = operands.rows, operands.features, operands.config
    segments = split_warp_row(features, operands.dtype.itemsize, warpgroups=config.warpgroups)
    if segments is None:
        raise ValueError(f"{features} features do not divide over {config.warpgroups} warpgroups; use fewer.")
    line_sums = LineSums(
        norm=operands.norm,
        dtype=operands.dtype,
        features=features,
        lines=config.warpgroups * WARPS,
        keeps_row=config.second_read == "float32",
    )
    parts = (config.warpgroups, WARPS, line_sums.line)
    inputs, out_types = operands.inputs, operands.out_types(parts)
    scratch = _scratch_types(operands, parts, line_sums)
    names = (*inputs, *out_types, *scratch)

    def kernel(*references):
        _rows_of_warpgroup(dict(zip(names, references, strict=True)), operands, line_sums, segments)

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
        compiler_params=SHARED_ROW_PARAMS,
        kernel_name=operands.kernel_name,
    )(*(seen_in_parts(name, array) for name, array in inputs.items()))
    return {
        name: output.reshape(*output.shape[: -len(parts)], features)
        for name, output in zip(out_types, outputs, strict=True)
    }


def _scratch_types(operands: BackwardOperands, parts: tuple[int, ...], line_sums: LineSums) -> dict[str, Any]:
    config, streams = operands.config, len(operands.streams)
    turns = 4 if config.second_read == "overlapped" else 2  # no warpgroup is ever so many rows ahead
    held_gain = {}
    if operands.scale is not None and config.gain == "shared":
        held_gain["gain"] = plgpu.SMEM(parts, operands.scale.dtype)
    return {
        "ring": plgpu.SMEM((config.steps, streams, *parts), operands.dtype),
        **held_gain,
        "line_sums": plgpu.SMEM((turns, line_sums.kinds, line_sums.lines), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=streams, num_barriers=config.steps),
        "summed": plgpu.Barrier(num_arrivals=config.warpgroups),
    }


def _rows_of_warpgroup(
    refs: dict[str, Any], operands: BackwardOperands, line_sums: LineSums, segments: tuple[WarpSegment, ...]
) -> None:
    """A warpgroup's part of the block's rows, one after the other; column sums stay in registers."""
    block, group = lax.axis_index("block"), lax.axis_index("warpgroup")
    trips = (operands.rows - block + operands.blocks - 1) // operands.blocks
    words = mixed_words(refs["words"]) if "words" in refs else None
    ring = RowRing(operands=operands, refs=refs, block=block, group=group, trips=trips)
    ring.fill()
    gain = load_row(refs["scale"].at[group], segments) if "scale" in refs else None
    if gain is not None and "gain" in refs:  # each thread reads back what it stores here itself
        store_row(refs["gain"].at[group], gain, segments)
    part = RowPart(
        ring=ring, sums_ref=refs["line_sums"], line_sums=line_sums, segments=segments, gain=gain, words=words
    )
    summed = refs["summed"]

    def arrive():
        plgpu.commit_smem()
        plgpu.barrier_arrive(summed)

    def step(i, sums):
        row = part.publish(i)
        arrive()
        plgpu.barrier_wait(summed)
        if line_sums.keeps_row:
            ring.refill(i)
        else:
            ring.refill(i - 1)
            # A zero the compiler cannot see through; else it keeps the first read's values in registers.
            row = part.load(i, lax.optimization_barrier(jnp.int32(0)))
        return part.finish(i, row, sums)

    def overlapped_step(i, sums):
        is_last = i + 1 == trips
        pl.when(~is_last)(lambda: (part.publish(i + 1), None)[1])
        plgpu.barrier_wait(summed)
        ring.refill(i - 2)  # who passes the barrier of row i has finished with row i - 2
        pl.when(~is_last)(arrive)
        return part.finish(i, part.load(i), sums)

    if operands.config.second_read == "overlapped":
        part.publish(jnp.int32(0))
        arrive()
        step = overlapped_step
    sums = lax.fori_loop(0, trips, step, {name: zeros_row(segments) for name in operands.sums})
    for name, values in sums.items():
        store_row(operands.sums_at(refs, block, name).at[group], values, segments)


@dataclass(frozen=True, kw_only=True)
class RowRing:
    """The block's rows in shared memory: row number i of its `trips`, of every stream, is at place i % steps.

    The first warpgroup asks for them.
    """

    operands: BackwardOperands
    refs: dict[str, Any]
    block: jax.Array
    group: jax.Array
    trips: jax.Array

    def index(self, i: jax.Array) -> jax.Array:
        """Of the block's row number i among all rows."""
        return i * self.operands.blocks + self.block

    def place(self, i: jax.Array) -> jax.Array:
        """Of the block's row number i in the ring."""
        return lax.rem(i, self.operands.config.steps)

    def fill(self) -> None:
        """Asks for the first rows."""

        @pl.when(self.group == 0)
        def _():
            for i in range(self.operands.config.steps):
                pl.when(i < self.trips)(lambda i=i: self._fetch(jnp.int32(i)))

    def refill(self, free: jax.Array) -> None:
        """Row `free` is not read again by anyone: its place is for the one `steps` later."""
        steps = self.operands.config.steps

        @pl.when((self.group == 0) & (free >= 0) & (free + steps < self.trips))
        def _():
            self._fetch(free + steps)

    def wait(self, i: jax.Array) -> None:
        """Until row number i is there."""
        plgpu.barrier_wait(self.refs["arrived"].at[self.place(i)])

    def _fetch(self, i: jax.Array) -> None:
        place = self.place(i)
        for s, name in enumerate(("total", "dy", "dtotal_in")[: len(self.operands.streams)]):
            plgpu.copy_gmem_to_smem(
                self.refs[name].at[self.index(i)],
                self.refs["ring"].at[place, s],
                self.refs["arrived"].at[place],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )


class LoadedRow(NamedTuple):
    """A warpgroup's part of a row, in float32, but for the sum's cotangent, which is as it is stored, or None.

    value: of the normalised row; less the row's first one if shifted. weighted: dy times the scale.
    """

    value: RowValues
    dy: RowValues
    weighted: RowValues
    cotangent: RowValues | None


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """The arithmetic of a warpgroup's part of each row.

    sums_ref: (turns, kinds, lines) in shared memory, the rows' sums in turn.
    gain: the scale in registers, which is read back from shared memory where it has a place there.
    """

    ring: RowRing
    sums_ref: Any
    line_sums: LineSums
    segments: tuple[WarpSegment, ...]
    gain: RowValues | None
    words: Words | None

    def load(self, i: jax.Array, first: jax.Array | int = 0) -> LoadedRow:
        """Row number i. first: 0."""
        refs, group, segments = self.ring.refs, self.ring.group, self.segments
        ring, place = refs["ring"], self.ring.place(i) + first
        value, dy = (to_float32(load_row(ring.at[place, s, group], segments)) for s in range(2))
        if self.line_sums.is_shifted:
            shift = ring[place, 0, 0, 0, 0].astype(jnp.float32)
            value = map_row(lambda v: v - shift, value)
        weighted = weigh(dy, load_row(refs["gain"].at[group], segments) if "gain" in refs else self.gain)
        has_cotangent = "dtotal_in" in refs
        return LoadedRow(value, dy, weighted, load_row(ring.at[place, 2, group], segments) if has_cotangent else None)

    def publish(self, i: jax.Array) -> LoadedRow:
        """Reads a row as soon as it is there and writes its sums where the other warpgroups find them."""
        self.ring.wait(i)
        row = self.load(i)
        for kind, values in enumerate(self.line_sums.of_part(row.value, row.weighted, self.segments)):
            self.sums_ref[self._turn(i), kind, pl.ds(self.ring.group * WARPS, WARPS)] = values
        return row

    def finish(self, i: jax.Array, row: LoadedRow, sums: dict[str, RowValues]) -> dict[str, RowValues]:
        """Writes the row's gradient, with the sums of all lines; returns the column sums with it."""
        refs, group, segments, operands = self.ring.refs, self.ring.group, self.segments, self.ring.operands
        scalars = self.line_sums.scalars(self.sums_ref.at[self._turn(i)])
        gradient, sums = scalars.finish(row.value, row.dy, row.weighted, sums)
        if row.cotangent is not None:
            gradient = map_row(jnp.add, gradient, to_float32(row.cotangent))
        index = self.ring.index(i)
        store_row(refs["dtotal"].at[index, group], gradient, segments)
        if self.words is not None:
            columns = tuple(s.row_columns(jnp.uint32, group=group, line=self.line_sums.line) for s in segments)
            dropped = operands.norm.drop(gradient, self.words, index, columns, operands.features)
            store_row(refs["dx"].at[index, group], dropped, segments)
        return sums

    def _turn(self, i: jax.Array) -> jax.Array:
        return lax.rem(i, self.sums_ref.shape[0])
