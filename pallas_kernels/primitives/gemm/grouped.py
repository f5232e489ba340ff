"""Products of consecutive groups of rows with a matrix each: which rows belong to which group is known on the device.

A tile has rows of one group, or rows that belong to none, whose results are zero. There is at most one tile more for
each group than for as many rows in one group; blocks share those that there are. Tiles begin at any row. So operands
and results lie in panels (`row_tiles`), of which TMA loads and stores any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from pallas_kernels.primitives.gemm.epilogue import Epilogue
from pallas_kernels.primitives.gemm.groups import REDUCTIONS, Groups, RowTile, group_types, padded_sizes, table_bytes
from pallas_kernels.primitives.gemm.launch import Roles, in_one_warp, launcher
from pallas_kernels.primitives.gemm.operands import padded_vector
from pallas_kernels.primitives.gemm.pipeline import Producer, Ring, ring_types
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.store import Pieces, Store
from pallas_kernels.primitives.hopper import TMA_ROWS
from pallas_kernels.primitives.platform import target_device, varying_like

_FEW = TMA_ROWS
"""A tile with at most this many rows loads only these."""


def grouped_product(
    x: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    group_sizes: jax.Array,
    *,
    transpose: bool = False,
    epilogue: Epilogue | None = None,
    biases: Sequence[jax.Array] = (),
    config: GemmConfig,
    name: str,
) -> tuple[jax.Array, ...]:
    """Returns the epilogue's results, each (rows, outputs) of x's dtype; zeros in rows of no group.

    Args:
        x: one left operand (rows, features), bfloat16 or float16, whose features are a multiple of 64. Or one for each
            of the weights: then the products are added up.
        weights: each (groups, features, outputs), or (groups, outputs, features) with `transpose`, of x's dtype.
        group_sizes: (groups,), integers: the rows of each group, one group after the other.
        epilogue: what follows the products, as in `gemm`.
        biases: (groups, outputs) of each product, any floating dtype; or none.
        config: the tiling, without clusters or several widths.
    """
    epilogue = epilogue or Epilogue()
    (rows, features), outputs, dtype = x[0].shape, weights[0].shape[1 if transpose else 2], x[0].dtype
    is_sum = len(x) > 1
    products = 1 if is_sum else len(weights)
    dtypes = epilogue.dtypes(products, dtype, dtype)
    stored = sum(dtype.itemsize for dtype in dtypes)
    config = config.fitted(
        itemsize=dtype.itemsize, stored_bytes=stored, products=products, other_bytes=table_bytes(group_sizes.size)
    )
    problem = Problem(
        m=rows,
        widths=(outputs,),
        k=features * len(x),
        dtype=dtype,
        config=config,
        accumulators=products,
        transpose_b=transpose,
        depths=(features,) * len(x) if is_sum else (),
        has_any_rows=True,
    )
    sizes = padded_sizes(group_sizes)
    columns = sum(problem.strip)
    extras = {"bias": [padded_vector(bias, columns) for bias in biases]}
    pieces = Pieces.of(problem, panel_itemsize=dtype.itemsize)
    kernel = launcher(
        problem,
        partial(_roles, problem, pieces, epilogue, dtypes, group_sizes.size),
        name=name,
        out_type=[jax.ShapeDtypeStruct((rows, outputs), dtype) for dtype in dtypes],
        scratch_types=(
            ring_types(problem),
            [pieces.scratch(dtype, config.warpgroups) for dtype in dtypes],
            plgpu.Barrier(num_barriers=config.warpgroups * pieces.slots),
            group_types(sizes),
        ),
        blocks=min(target_device().core_count, (problem.grid[0] + group_sizes.size) * problem.grid[1]),
        **REDUCTIONS,
    )
    results = kernel(sizes, list(x), list(weights), extras)
    return tuple(varying_like(result, sizes, *x, *weights, *extras["bias"]) for result in results)  # pyright: ignore


def _roles(
    problem: Problem, pieces: Pieces, epilogue: Epilogue, dtypes: Sequence[jnp.dtype], count: int, *refs: Any
) -> Roles:
    """Returns the function that `launcher` takes. count: of groups."""
    sizes, x_refs, w_refs, extra_refs, *outputs, ring_refs, buffers, arrived, (table, is_listed) = refs
    ring = Ring.of(problem, ring_refs)
    tile_m = problem.config.tile_m
    groups = Groups(count=count, rows=problem.m, tile=tile_m, sizes=sizes, table=table, is_listed=is_listed)

    def load_tile(tile: RowTile, column: jax.Array, before: jax.Array) -> None:
        @pl.when(tile.is_product)
        def _():
            own = [ref.at[tile.group] for ref in w_refs]
            for rows, is_enough in ((_FEW, tile.count <= _FEW), (tile_m, tile.count > _FEW)):
                producer = Producer(problem=problem, ring=ring, a=x_refs, b=own, rows=rows)
                load = partial(producer.tile, tile.first, column, None, before)
                pl.when(is_enough)(in_one_warp(load, *x_refs, *w_refs))

    def produce() -> None:
        steps = _for_each_tile(problem, groups, load_tile)
        in_one_warp(partial(drain, ring.empty, problem.config.stages, steps), *x_refs, *w_refs)()

    def consume(warpgroup: jax.Array) -> None:
        first_row = warpgroup * problem.config.warpgroup_rows
        pl.when(warpgroup == 0)(groups.list)

        def multiply(tile: RowTile, column: jax.Array, before: jax.Array) -> None:
            own_rows = tile.count - first_row
            own = {"bias": [ref.at[tile.group] for ref in extra_refs["bias"]]}
            store = Store(
                pieces=pieces,
                epilogue=epilogue,
                extras=own,
                outputs=outputs,
                buffers=[pieces.tiles(buffer, d).at(warpgroup) for buffer, d in zip(buffers, dtypes, strict=True)],
                arrived=arrived,
                first_barrier=warpgroup * pieces.slots,
                count=own_rows,
            )
            consumer = Consumer(problem=problem, ring=ring, stores=[store], first_row=first_row)
            is_own = tile.is_product & (own_rows > 0)
            pl.when(is_own)(lambda: consumer.tile(tile.first, column, problem.columns, before))
            pl.when(tile.is_product & (own_rows <= 0))(lambda: _pass_over(ring, problem.steps, before))
            zeros = replace(store, epilogue=Epilogue(), extras={})
            pl.when((tile.group == count) & (own_rows > 0))(lambda: _store_zeros(zeros, tile.first + first_row, column))

        _for_each_tile(problem, groups, multiply)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return produce, consume


def _for_each_tile(problem: Problem, groups: Groups, work: Callable[..., None]) -> jax.Array:
    """Calls `work(tile, column, before)` for each tile of the block; returns the block's number of steps.

    before: the number of steps of the block's earlier tiles.
    """
    plgpu.barrier_wait(groups.is_listed)
    rows, columns = groups.tiles(), problem.grid[1]

    @plgpu.nd_loop((rows * columns,), collective_axes="block", init_carry=jnp.int32(0))
    def steps(info, carry):
        i, j = plgpu.planar_snake(info.index[0], (rows, columns), 0, problem.config.group)
        tile = groups.tile_at(i)
        work(tile, j * problem.columns, carry)
        return carry + jnp.where(tile.is_product, problem.steps, 0)

    return steps  # pyright: ignore[reportReturnType]: the decorator gives the last carry


def _pass_over(ring: Ring, steps: int, before: jax.Array) -> None:
    """Releases the stages of a tile in which the warpgroup has no rows."""

    def step(i, _):
        stage = lax.rem(before + i, ring.problem.config.stages)
        plgpu.barrier_wait(ring.full.at[stage])
        plgpu.barrier_arrive(ring.empty.at[stage])

    lax.fori_loop(0, steps, step, None)


def _store_zeros(store: Store, row: jax.Array, column: jax.Array) -> None:
    """Stores zeros in all results."""
    shape = store.pieces.rows, store.pieces.width
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    store.finish([zeros] * len(store.outputs), row, column)
