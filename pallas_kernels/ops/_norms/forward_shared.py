"""The forward kernel in which each warp has a line of a row, for one or several warpgroups a row.

The row is in registers, half of them or a quarter a thread with several warpgroups, or in shared memory, where TMA
brings it. Warps exchange their lines' sums through shared memory, with one barrier for each kind of sum: the means to
take off, one after the other, then the squares of what is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops._norms.config import ForwardConfig
from pallas_kernels.ops._norms.norm import SHARED_ROW_PARAMS, Norm, lanes_of_lines
from pallas_kernels.primitives import settings
from pallas_kernels.primitives.random import mixed_words
from pallas_kernels.primitives.rows import (
    WARPS,
    RowValues,
    Segment,
    WarpSegment,
    cut_row,
    line_sums,
    load_row,
    map_row,
    split_warp_row,
    store_row,
    to_float32,
)


def shared_row_forward(
    norm: Norm, operands: dict[str, jax.Array], outputs: tuple[str, ...], config: ForwardConfig, *, kernel_name: str
) -> tuple[jax.Array, ...]:
    """The arrays called `outputs` ("y" and, with a residual, "total"); `operands` as `norm_forward` names them."""
    x, warpgroups = operands["x"], config.warpgroups
    rows, features = x.shape
    segments = split_warp_row(features, x.dtype.itemsize, warpgroups=warpgroups)
    if segments is None:
        raise ValueError(f"{features} features do not divide over {warpgroups} warpgroups; use fewer.")
    if config.piece:
        segments = cast("tuple[WarpSegment, ...]", cut_row(segments, config.piece))
    lines = warpgroups * WARPS
    parts = (warpgroups, WARPS, features // lines)
    # Values of 16 bits have deviations that their own distance from any of the row's values does not drown: with one of
    # them taken off, sums and sums of squares are exchanged together.
    is_shifted = norm.centered and x.dtype.itemsize < 4 and "residual" not in operands
    mean_passes = 0 if is_shifted else norm.mean_passes(x.dtype)
    streams = tuple(name for name in ("x", "residual") if name in operands)
    scratch = {
        "line_sums": plgpu.SMEM((mean_passes + 1 + is_shifted, lines), jnp.float32),
        "summed": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=mean_passes + 1),
    }
    if config.holds == "shared":
        scratch["held"] = plgpu.SMEM((len(streams), *parts), x.dtype)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=len(streams))
    names = (*operands, *outputs, *scratch)

    def kernel(*references):
        refs = dict(zip(names, references, strict=True))
        row, group = lax.axis_index("row"), lax.axis_index("warpgroup")
        part = RowPart(norm=norm, refs=refs, streams=streams, segments=segments, row=row, group=group)
        _normalise(part, mean_passes=mean_passes, is_shifted=is_shifted)

    def seen_in_parts(name, array):
        return array if name == "words" else array.reshape(parts if array.ndim == 1 else (rows, *parts))

    results = settings.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((rows, *parts), x.dtype),) * len(outputs),
        grid=(rows,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        compiler_params=SHARED_ROW_PARAMS,
        kernel_name=kernel_name,
    )(*(seen_in_parts(name, array) for name, array in operands.items()))
    return tuple(result.reshape(rows, features) for result in results)


def _normalise(part: RowPart, *, mean_passes: int, is_shifted: bool) -> None:
    """Reads a warpgroup's part of a row, and writes it normalised."""
    segments, features = part.segments, part.features
    stored = part.bring()
    means = []

    def read():
        """The row, or a way to it that the compiler takes for another one than before."""
        # Else it keeps the first read's values in registers.
        return stored if stored is not None else lax.optimization_barrier(jnp.int32(0))

    def centered(source, segments):
        value = to_float32(source if stored is not None else part.load(source, segments))
        for mean in means:
            value = map_row(lambda v, mean=mean: v - mean, value)
        return value

    for turn in range(mean_passes):
        (total,) = part.sums_over_row(turn, centered(read(), segments))
        means.append(total * (1.0 / features))
    if is_shifted:
        shift = part.first_value().astype(jnp.float32)
        value = map_row(lambda v: v - shift, centered(read(), segments))
        total, squares = part.sums_over_row(0, value, map_row(jnp.square, value))
        mean = total * (1.0 / features)
        mean_square = jnp.maximum(squares * (1.0 / features) - mean * mean, jnp.float32(0))
        means.append(shift + mean)
    else:
        (squares,) = part.sums_over_row(mean_passes, map_row(jnp.square, centered(read(), segments)))
        mean_square = squares * (1.0 / features)
    inverse = lax.rsqrt(mean_square + part.norm.epsilon)
    source = read()
    for i, segment in enumerate(segments):
        (value,) = centered(source if stored is None else stored[i : i + 1], (segment,))
        part.store(value * inverse, segment)


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """One warpgroup's part of the block's row.

    refs: operands, outputs and scratch by name, rows seen as (warpgroups, 4, columns); "held" where shared memory holds
    the row. streams: the operands that are read row by row.
    """

    norm: Norm
    refs: dict[str, Any]
    streams: tuple[str, ...]
    segments: tuple[WarpSegment, ...]
    row: jax.Array
    group: jax.Array

    @property
    def features(self) -> int:
        """Of the whole row."""
        return math.prod(self.refs["x"].shape[1:])

    def bring(self) -> RowValues | None:
        """The values to normalise, or None if they are in shared memory now."""
        has_residual = "residual" in self.refs
        if "held" not in self.refs:
            return self._add_residual(self.segments) if has_residual else self.load(0, self.segments)
        self._fetch()
        for segment in self.segments if has_residual else ():
            store_row(self.refs["held"].at[0, self.group], self._add_residual((segment,)), (segment,))
        return None

    def load(self, stream: jax.Array | int, segments: Sequence[Segment]) -> RowValues:
        """Of one of the streams, by number."""
        if "held" in self.refs:
            return load_row(self.refs["held"].at[stream, self.group], segments)
        return load_row(self.refs[self.streams[stream]].at[self.row, self.group], segments)

    def first_value(self) -> jax.Array:
        """Of the row, as it is stored."""
        return self.refs["held"][0, 0, 0, 0] if "held" in self.refs else self.refs["x"][self.row, 0, 0, 0]

    def sums_over_row(self, turn: int, *kinds: RowValues) -> list[jax.Array]:
        """The sums of some rows of values. Each turn has a barrier and places of its own."""
        sums_ref, summed = self.refs["line_sums"], self.refs["summed"].at[turn]
        places = range(turn, turn + len(kinds))
        for place, values in zip(places, kinds, strict=True):
            sums_ref[place, pl.ds(self.group * WARPS, WARPS)] = line_sums(values)
        plgpu.commit_smem()
        plgpu.barrier_arrive(summed)
        plgpu.barrier_wait(summed)
        layout = lanes_of_lines(sums_ref.shape[1])
        sums = [plgpu.load(sums_ref.at[place], layout=layout, optimized=False) for place in places]
        return [jnp.sum(values) for values in sums]

    def store(self, value: jax.Array, segment: Segment) -> None:
        """Writes a segment of the output, scaled: registers hold one segment's scale and bias at a time."""
        refs, group = self.refs, self.group
        if "scale" in refs:
            value *= load_row(refs["scale"].at[group], (segment,))[0].astype(jnp.float32)
        if "bias" in refs:
            value += load_row(refs["bias"].at[group], (segment,))[0].astype(jnp.float32)
        store_row(refs["y"].at[self.row, group], (value,), (segment,))

    def _fetch(self) -> None:
        """Brings the whole row to shared memory; the first warpgroup asks for it."""

        @pl.when(self.group == 0)
        def _():
            for stream, name in enumerate(self.streams):
                plgpu.copy_gmem_to_smem(
                    self.refs[name].at[self.row],
                    self.refs["held"].at[stream],
                    self.refs["arrived"],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        plgpu.barrier_wait(self.refs["arrived"])

    def _add_residual(self, segments: Sequence[WarpSegment]) -> RowValues:
        """The sum with the residual, as it is stored."""
        refs, row, group = self.refs, self.row, self.group
        value = to_float32(self.load(0, segments))
        if "words" in refs:
            line = refs["x"].shape[-1]
            columns = tuple(s.row_columns(jnp.uint32, group=group, line=line) for s in segments)
            value = self.norm.drop(value, mixed_words(refs["words"]), row, columns, self.features)
        total = map_row(lambda a, b: (a + b).astype(refs["total"].dtype), value, to_float32(self.load(1, segments)))
        store_row(refs["total"].at[row, group], total, segments)
        return total
