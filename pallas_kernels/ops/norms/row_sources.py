"""Where the backward kernel's rows come from: memory directly, if they are short, or a ring in shared memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.norms.config import BackwardConfig
from pallas_kernels.primitives.barriers import meet
from pallas_kernels.primitives.compat import store
from pallas_kernels.primitives.row_kernel import HeldRows
from pallas_kernels.primitives.rows import (
    WARPS,
    RowValues,
    Segment,
    line_sums,
    load_columns,
    load_row,
    map_row,
    row_sum,
    short_rows_at_once,
    split_row,
    split_short_rows,
    split_warp_row,
    store_row,
    to_float32,
)

STREAMS = ("total", "dy", "dtotal")
"""The arrays that are read row by row: what was normalised, y's cotangent and, if it has one, the sum's."""

Scalars = tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows that a warpgroup differentiates at once, or its part of one row.

    index, columns: each element's row, or that of all, and column.
    statistics: see `StaticNorm.statistics`; they and what `sums` returns combine with the elements.
    read: returns the streams. sums: sums each of its arguments over the whole rows; called once.
    is_read_again: whether `read` is called again after `sums`, as registers do not keep the values.
    counted: sets values to zero in rows that another step counts.
    """

    index: jax.Array
    columns: tuple[jax.Array, ...]
    statistics: Scalars
    read: Callable[[], list[RowValues]]
    sums: Callable[..., list[jax.Array]]
    store: Callable[[Any, RowValues], None]
    is_read_again: bool = False
    counted: Callable[[RowValues], RowValues] = lambda values: values


@dataclass(frozen=True, kw_only=True)
class Source:
    """The rows of a block, step by step.

    segments: how the warpgroup holds rows. trips: the block's steps. gain: reads the scale; None without one.
    read_ahead: reads the statistics of a step, one step earlier, so that no thread waits for them.
    arrived: returns the rows of a step, from the step's number and its statistics.
    store_sums: writes the block's column sums to a reference.
    """

    segments: tuple[Segment, ...]
    trips: jax.Array
    gain: Callable[[], RowValues] | None
    read_ahead: Callable[[jax.Array], Scalars]
    arrived: Callable[[jax.Array, Scalars], list[Rows]]
    store_sums: Callable[[Any, RowValues], None]


def short_scratch(operands: dict[str, jax.Array], _: BackwardConfig) -> dict[str, Any]:
    """Returns the scratch types for `short_rows`, by name."""
    pieces = split_short_rows(operands["total"].shape[1], operands["total"].dtype.itemsize, rows=WARPS)
    return {"lines": plgpu.SMEM((len(pieces), *pieces[0].shape), jnp.float32)}


def short_rows(refs: dict[str, Any], config: BackwardConfig, blocks: int) -> Source:
    """Reads several short rows at once directly to registers, while other blocks of the multiprocessor wait for theirs.

    Each warp holds whole rows. At the end the column sums of the four warps are added up in shared memory.
    """
    del config
    (rows, features), itemsize, block = refs["total"].shape, refs["total"].dtype.itemsize, lax.axis_index("block")
    segments, at_once = split_short_rows(features, itemsize, rows=WARPS), short_rows_at_once((rows, features), itemsize)
    streams, statistics = [refs[name] for name in STREAMS if name in refs], refs["statistics"]
    gain = load_columns(refs["scale"], segments) if "scale" in refs else None

    def arrived(i, _):
        start = (i * blocks + block) * at_once
        first, loaded = jnp.minimum(start, rows - at_once), []
        for line in range(0, at_once, WARPS):  # all loads are under way before the first wait
            held = HeldRows(at=pl.ds(first + line, WARPS), segments=segments)
            scalars = [held.load_value(statistics.at[kind]) for kind in range(statistics.shape[0])]
            loaded.append((held, [load_row(ref.at[held.at], segments) for ref in streams], scalars))

        def of_warps(held, values, scalars):
            def counted(dy):
                return map_row(lambda d: jnp.where(held.index >= start, d, jnp.float32(0)), dy)

            return Rows(
                index=held.index,
                columns=tuple(s.columns(jnp.uint32) for s in segments),
                statistics=tuple(map(held.spread, scalars)),
                read=lambda: values,
                sums=lambda *terms: [held.spread(held.sum(each)) for each in terms],
                store=held.store,
                counted=counted if rows % at_once else lambda dy: dy,
            )

        return [of_warps(*each) for each in loaded]

    def store_sums(ref, values):
        for i, value in enumerate(values):
            refs["lines"][i] = value
        plgpu.commit_smem()
        for i, segment in enumerate(segments):
            layout = segment.layout.reduce(0)
            lines = [plgpu.load(refs["lines"].at[i, line], layout=layout, optimized=False) for line in range(WARPS)]
            store(ref.at[segment.index[-1:]], functools.reduce(jnp.add, lines))
        plgpu.commit_smem()  # the next sums take the same place

    return Source(
        segments=segments,
        trips=(pl.cdiv(rows, at_once) - block + blocks - 1) // blocks,
        gain=None if gain is None else lambda: to_float32(gain),
        read_ahead=lambda _: (),  # the statistics come with the rows
        arrived=arrived,
        store_sums=store_sums,
    )


def ring_scratch(operands: dict[str, jax.Array], config: BackwardConfig) -> dict[str, Any]:
    """Returns the scratch types for `ring_rows`, by name."""
    parts, streams = operands["total"].shape[1:], sum(name in operands for name in STREAMS)
    gain = {"gain": plgpu.SMEM(parts, operands["scale"].dtype)} if "scale" in operands else {}
    return gain | {
        "ring": plgpu.SMEM((config.steps, streams, *parts), operands["total"].dtype),
        "line_sums": plgpu.SMEM((2, 2, config.warpgroups * WARPS), jnp.float32),  # no warpgroup is two rows ahead
        "arrived": plgpu.Barrier(num_arrivals=streams, num_barriers=config.steps),
        "summed": plgpu.Barrier(num_arrivals=config.warpgroups),
    }


def ring_rows(refs: dict[str, Any], config: BackwardConfig, blocks: int) -> Source:
    """Brings rows by TMA to a ring in shared memory: row number i of the block is in stage i % steps.

    One warpgroup takes any row, several only one that divides evenly over their warps. Warps that have a line each
    synchronise once a row. That publishes the sums of their parts and shows that all have finished the row before,
    whose stage the first warpgroup then fills again.
    """
    (rows, *shape), itemsize, sharers = refs["total"].shape, refs["total"].dtype.itemsize, config.warpgroups
    block, group = lax.axis_index("block"), lax.axis_index("warpgroup")
    part = (group,) if len(shape) > 1 else ()
    segments = split_warp_row(math.prod(shape), itemsize, warpgroups=sharers) if part else split_row(shape[0], itemsize)
    assert segments is not None and (part or sharers == 1), (
        f"{shape[0]} features do not divide over {sharers} warpgroups"
    )
    streams, statistics = [refs[name] for name in STREAMS if name in refs], refs["statistics"]
    trips = (rows - block + blocks - 1) // blocks

    def fetch(i, is_needed):
        @pl.when((group == 0) & is_needed)
        def _():
            stage = lax.rem(i, config.steps)
            for s, ref in enumerate(streams):
                place, barrier = refs["ring"].at[stage, s], refs["arrived"].at[stage]
                # Without this promise TMA would copy at most 256 columns at a time.
                promise = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
                plgpu.copy_gmem_to_smem(ref.at[i * blocks + block], place, barrier, oob_mode=promise)

    for i in range(config.steps):
        fetch(jnp.int32(i), i < trips)
    if "scale" in refs:
        store_row(refs["gain"].at[part], load_row(refs["scale"].at[part], segments), segments)
        plgpu.commit_smem()  # two threads write the columns that a ragged row's last segment repeats

    def read_ahead(i):
        row = jnp.minimum(i * blocks + block, rows - 1)
        return tuple(statistics[kind, row] for kind in range(statistics.shape[0]))

    def sums_of_parts(i, terms):
        if not part:
            found = [row_sum(each, segments) for each in terms]
            plgpu.commit_smem()
            return found
        lines = refs["line_sums"].at[lax.rem(i, 2)]
        for kind, each in enumerate(terms):
            lines[kind, pl.ds(group * WARPS, WARPS)] = line_sums(each, segments)
        meet(refs["summed"])
        # Adding takes less time than shuffles.
        every = range(sharers * WARPS)
        return [functools.reduce(jnp.add, [lines[kind, line] for line in every]) for kind in range(len(terms))]

    def arrived(i, statistics):
        index, stage = i * blocks + block, lax.rem(i, config.steps)
        plgpu.barrier_wait(refs["arrived"].at[stage])

        def read():
            # A zero that the compiler cannot see, so that it does not keep the values of the first read in registers.
            place = stage + lax.optimization_barrier(jnp.int32(0))
            return [load_row(refs["ring"].at[(place, s, *part)], segments) for s in range(len(streams))]

        def sums(*terms):
            found = sums_of_parts(i, terms)
            free = i if config.keeps_row else i - 1
            fetch(free + config.steps, (free >= 0) & (free + config.steps < trips))
            return found

        def columns(segment):
            if not part:
                return segment.columns(jnp.uint32)
            return segment.row_columns(jnp.uint32, group=group, line=shape[-1])

        return [
            Rows(
                index=index,
                columns=tuple(map(columns, segments)),
                statistics=statistics,
                read=read,
                sums=sums,
                store=lambda ref, values: store_row(ref.at[(index, *part)], values, segments),
                is_read_again=not config.keeps_row,
            )
        ]

    return Source(
        segments=segments,
        trips=trips,
        gain=(lambda: to_float32(load_row(refs["gain"].at[part], segments))) if "scale" in refs else None,
        read_ahead=read_ahead,
        arrived=arrived,
        store_sums=lambda ref, values: store_row(ref.at[part], values, segments),
    )
