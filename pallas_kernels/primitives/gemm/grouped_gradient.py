"""Products of the transposed rows of a group with others: the gradient of each group's matrix.

Each tile of each group's result adds up the group's rows. TMA loads steps of rows from a multiple of eight on, so the
first step of a group may have rows of the group before, and the last one rows of the next. The consumers set those of
the left operand to zero in shared memory, and those of the right one where they belong to no group. The result of a
group without rows is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.barriers import drain
from pallas_kernels.primitives.gemm.config import GemmConfig
from pallas_kernels.primitives.gemm.consumer import Consumer
from pallas_kernels.primitives.gemm.groups import REDUCTIONS, Groups, group_types, padded_sizes, table_bytes
from pallas_kernels.primitives.gemm.launch import Roles, in_one_warp, launcher
from pallas_kernels.primitives.gemm.operands import COLUMNS, padded_rows
from pallas_kernels.primitives.gemm.pipeline import Producer, Ring, release_last, ring_types, run_steps
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.store import Pieces, Store
from pallas_kernels.primitives.hopper import TMA_ROWS
from pallas_kernels.primitives.platform import target_device, varying_like


def grouped_weight_gradient(
    x: jax.Array, dy: jax.Array, group_sizes: jax.Array, *, dtype: jnp.dtype, name: str
) -> jax.Array:
    """Returns x[rows].T @ dy[rows] of each group's rows, (groups, features, outputs) of `dtype`.

    x: (rows, features), dy: (rows, outputs), of one 16-bit dtype; features and outputs are multiples of 64.
    group_sizes: (groups,), integers.
    """
    groups, rows, features, outputs = group_sizes.size, x.shape[0], x.shape[1], dy.shape[1]
    sizes = padded_sizes(group_sizes)
    x, dy = padded_rows(x, TMA_ROWS), padded_rows(dy, TMA_ROWS)
    config = GemmConfig().fitted(
        itemsize=x.dtype.itemsize, stored_bytes=dtype.itemsize, other_bytes=table_bytes(groups)
    )
    problem = Problem(m=features, widths=(outputs,), k=x.shape[0], dtype=x.dtype, config=config, transpose_a=True)
    pieces = Pieces.of(problem)
    tiles = groups * problem.grid[0] * problem.grid[1]
    kernel = launcher(
        problem,
        partial(_roles, problem, pieces, groups, rows),
        name=name,
        out_type=jax.ShapeDtypeStruct((groups, features, outputs), dtype),
        scratch_types=(
            ring_types(problem),
            pieces.scratch(dtype, config.warpgroups),
            plgpu.Barrier(num_arrivals=config.warpgroups),
            plgpu.Barrier(num_barriers=config.warpgroups * pieces.slots),
            group_types(sizes),
        ),
        blocks=min(target_device().core_count, tiles),
        **REDUCTIONS,
    )
    return varying_like(kernel(sizes, x, dy), sizes, x, dy)


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group's rows. first: of its first step. all: the number of rows of all groups."""

    start: jax.Array
    end: jax.Array
    first: jax.Array
    steps: jax.Array
    all: jax.Array


def _roles(problem: Problem, pieces: Pieces, count: int, rows: int, *refs: Any) -> Roles:
    """Returns the function that `launcher` takes. count: of groups. rows: that x has without its padding."""
    sizes, x_ref, dy_ref, output, ring_refs, buffer, masked, _, (table, is_listed) = refs
    ring, depth = Ring.of(problem, ring_refs), problem.config.tile_k
    groups = Groups(count=count, rows=rows, tile=depth, sizes=sizes, table=table, is_listed=is_listed)

    def load_tile(_, rows: Group, row: jax.Array, column: jax.Array, before: jax.Array) -> None:
        producer = Producer(problem=problem, ring=ring, a=[x_ref], b=[dy_ref])

        def step(i, _):
            producer.load(row, column, pl.ds(rows.first + i * depth, depth), producer.free_stage(before + i))

        in_one_warp(lambda: lax.fori_loop(0, rows.steps, step, None), x_ref, dy_ref)()

    def produce() -> None:
        steps = _for_each_tile(problem, groups, load_tile)
        in_one_warp(partial(drain, ring.empty, problem.config.stages, steps), x_ref, dy_ref)()

    def consume(warpgroup: jax.Array) -> None:
        first_row = warpgroup * problem.config.warpgroup_rows
        pl.when(warpgroup == 0)(groups.list)

        def multiply(group, rows: Group, row: jax.Array, column: jax.Array, before: jax.Array) -> None:
            own = pieces.tiles(buffer, output.dtype).at(warpgroup)
            store = Store.of_one_result(pieces, output=output.at[group], buffer=own)
            consumer = Consumer(problem=problem, ring=ring, stores=[store], first_row=first_row)

            def issue(accumulator, i, stage):
                first = rows.first + i * depth
                start, end = rows.start - first, rows.end - first
                own = ring.a.read.at[stage, :, pl.ds(first_row, problem.config.warpgroup_rows)]
                pl.when((start > 0) | (end < depth))(lambda: _mask(own, start, end))

                @pl.when(first + depth > rows.all)
                def _():
                    width = problem.columns // problem.config.warpgroups
                    _mask(ring.b[0].at[stage, :, pl.ds(warpgroup * width, width)], start, end)
                    plgpu.barrier_arrive(masked)
                    plgpu.barrier_wait(masked)

                consumer.issue(problem.columns, [accumulator], i, stage)

            def product(accumulator):
                run_steps(ring, partial(issue, accumulator), rows.steps, before)
                value = accumulator[...]
                release_last(ring, rows.steps, before)
                store.finish([value], row + first_row, column)

            shape = problem.config.warpgroup_rows, problem.columns
            pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

        _for_each_tile(problem, groups, multiply)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return produce, consume


def _for_each_tile(problem: Problem, groups: Groups, work: Callable[..., None]) -> jax.Array:
    """Calls `work(group, rows, row, column, before)` for each tile of the block; returns its number of steps."""
    config, (rows, columns) = problem.config, problem.grid
    plgpu.barrier_wait(groups.is_listed)
    last, _ = groups.bounds(groups.count)

    @plgpu.nd_loop((groups.count * rows * columns,), collective_axes="block", init_carry=jnp.int32(0))
    def steps(info, carry):
        group = lax.div(info.index[0], rows * columns)
        place = lax.rem(info.index[0], rows * columns)
        i, j = plgpu.planar_snake(place, (rows, columns), 0, min(config.group, rows))
        start, end = groups.bounds(group)
        first = start & -TMA_ROWS
        own = jnp.where(end > start, pl.cdiv(end - first, config.tile_k), 0)
        work(
            group,
            Group(start=start, end=end, first=first, steps=own, all=last),
            i * config.tile_m,
            j * config.tile_n,
            carry,
        )
        return carry + own

    return steps  # pyright: ignore[reportReturnType]: the decorator gives the last carry


def _mask(tile: Any, start: jax.Array, end: jax.Array) -> None:
    """Sets the rows before `start` and from `end` on to zero."""
    for first in range(0, tile.shape[1], COLUMNS):
        place = tile.at[:, pl.ds(first, COLUMNS)]
        values = plgpu.load(place, layout=plgpu.Layout.WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
        place[...] = jnp.where((row >= start) & (row < end), values, jnp.zeros_like(values))
    plgpu.commit_smem()
