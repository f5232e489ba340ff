"""The steps of a tile: the producer's TMA copies and the computing warpgroups' products, through a ring of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.gemm.sharing import Part, Sharing, Sums
from pallas_kernels.primitives.gemm.store import Store


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Operands in shared memory, one tile of each a stage.

    full: a barrier a stage, passed when all of the stage's tiles have arrived.
    empty: likewise, when every computing warpgroup is done with them.
    ahead: a barrier that the first computing warpgroup passes on to the others when it is far enough ahead.
    """

    problem: Problem
    a: Sequence[Any]
    b: Sequence[Any]
    full: Any
    empty: Any
    ahead: Any


def ring_types(problem: Problem, lefts: int, rights: int) -> dict[str, Any]:
    """Scratch types of `Ring`'s members, of so many left and right operands."""
    config = problem.config
    barrier = plgpu.Barrier
    if config.cluster is not None:
        barrier = partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    return {
        "a": [shared((config.stages, *problem.a_block), problem.dtype, swizzle=problem.swizzle) for _ in range(lefts)],
        "b": [shared((config.stages, *problem.b_block), problem.dtype, swizzle=problem.swizzle) for _ in range(rights)],
        "full": plgpu.Barrier(num_arrivals=lefts + rights, num_barriers=config.stages),
        "empty": barrier(num_arrivals=config.warpgroups, num_barriers=config.stages),
        "ahead": plgpu.Barrier(),
    }


def for_each_tile(problem: Problem, work, *, sharing: Sharing | None = None) -> jax.Array:
    """Calls work(row, column, columns, steps before) for each of the block's tiles; returns how many steps it has.

    row and column are the tile's first in the result, or in the results beside each other (see `Problem.spans`).
    columns: of each accumulator in the tile.
    sharing: how the last tiles are shared; work is then also told which part of the tile is the block's.
    """
    config = problem.config
    rows, columns = problem.grid

    def place(tile):
        minor = {"m": 0, "n": 1}[config.minor]
        i, j = plgpu.planar_snake(tile, (rows, columns), minor, min(config.group, (rows, columns)[minor]))
        if config.cluster == "m":
            i = 2 * i + lax.axis_index("cluster")
        if config.cluster == "n":
            j = 2 * j + lax.axis_index("cluster")
        return i * config.tile_m, j * sum(problem.strip)

    if sharing is not None:

        def own(tile, part, before):
            row, column = place(tile)
            work(row, column, problem.columns, before, part)

        return sharing.for_each(lax.axis_index("block"), own)

    @plgpu.nd_loop((rows * columns,), collective_axes="block", init_carry=jnp.int32(0))
    def steps(info, carry):
        row, column = place(info.index[0])
        return for_each_of_strip(problem, partial(work, row), column, carry)

    return steps  # pyright: ignore[reportReturnType]: the decorator gives the last carry


def for_each_of_strip(problem: Problem, work, column: jax.Array, before: jax.Array, steps: int | None = None):
    """Calls work(column, columns, steps before) for each tile of the strip that begins there; returns the steps so far.

    steps: of a tile, where they are not the problem's.
    """
    steps = problem.steps if steps is None else steps

    def tiles(count, columns, column, before):
        def nth(n, _):
            work(column + n * columns, columns, before + n * steps)

        nth(0, None) if count == 1 else lax.fori_loop(0, count, nth, None)

    for columns, alike in groupby(problem.strip):
        count = len(list(alike))
        tiles(count, columns, column, before)
        column, before = column + count * columns, before + count * steps
    return before


def produce(
    problem: Problem, a_refs: Sequence[Any], b_refs: Sequence[Any], ring: Ring, *, sharing: Sharing | None = None
) -> None:
    """Brings the operands of every step of every tile, as early as there is room."""
    config = problem.config
    shared_a = "cluster" if config.cluster == "n" else None
    shared_b = "cluster" if config.cluster == "m" else None
    whole = problem.transpose_a or problem.brought_rows == config.tile_m
    brought = config.tile_m if whole else problem.brought_rows
    every_step = Part(first=0, steps=problem.steps)

    def tile(row, column, _, before, part=every_step):
        def step(i, _):
            stage = lax.rem(before + i, config.stages)

            @pl.when(before + i >= config.stages)
            def _():
                plgpu.barrier_wait(ring.empty.at[stage])

            place = part.first + i
            if config.reverses:
                is_odd = lax.rem(lax.div(before, problem.steps), 2) == 1
                place = jnp.where(is_odd, problem.steps - 1 - i, i)
            depth = pl.ds(place * config.tile_k, config.tile_k)
            a_index = _ordered(pl.ds(row, brought), depth, problem.transpose_a)

            def bring_b(ref, buffer, column):
                index = _ordered(depth, pl.ds(column, problem.columns), problem.transpose_b)
                plgpu.copy_gmem_to_smem(ref.at[index], buffer.at[stage], ring.full.at[stage], collective_axes=shared_b)

            for ref, buffer in zip(a_refs, ring.a, strict=True):
                place = buffer.at[stage] if whole else buffer.at[stage, pl.ds(0, brought)]
                plgpu.copy_gmem_to_smem(ref.at[a_index], place, ring.full.at[stage], collective_axes=shared_a)
            if len(problem.widths) == 1:
                for ref, buffer in zip(b_refs, ring.b, strict=True):
                    bring_b(ref, buffer, column)
                return
            for ref, (is_own, first) in zip(b_refs, problem.owners(column), strict=True):
                pl.when(is_own)(partial(bring_b, ref, ring.b[0], column - first))

        lax.fori_loop(0, part.steps, step, None)

    drain(ring.empty, config.stages, for_each_tile(problem, tile, sharing=sharing))


def drain(barriers: Any, count: int, steps: jax.Array) -> None:
    """Waits once more for each of so many barriers that took turns over so many steps.

    No barrier may be left with an arrival that nobody has seen, and no block of a cluster may leave early.
    """

    def one(i, _):
        plgpu.barrier_wait(barriers.at[lax.rem(i, count)])

    lax.fori_loop(jnp.maximum(steps - count, 0), steps, one, None)


def _ordered(first, second, is_transposed: bool):
    return (second, first) if is_transposed else (first, second)


def run_steps(
    ring: Ring,
    issue: Callable[[jax.Array, jax.Array], None],
    steps: int | jax.Array,
    before: jax.Array,
    *,
    products: int = 1,
    done_with: Callable[[jax.Array], None] | None = None,
) -> None:
    """Calls issue(step, stage), which starts so many products, for each step of a tile, when its operands are there.

    Stages are given back when their products are done; the last steps' may be unfinished: see `give_back_last`.
    done_with: is told of the steps that are done; the first numbers may be less than 0.
    """
    config = ring.problem.config

    def step(i, _):
        stage = lax.rem(before + i, config.stages)
        plgpu.barrier_wait(ring.full.at[stage])
        issue(i, stage)
        plgpu.wgmma_wait(config.in_flight * products)
        done = lax.rem(before + i - config.in_flight + config.stages, config.stages)
        if config.in_flight:
            plgpu.barrier_arrive(ring.empty.at[done], predicate=i >= config.in_flight)
        else:
            plgpu.barrier_arrive(ring.empty.at[done])
        if done_with is not None:
            done_with(i - config.in_flight)

    lax.fori_loop(0, steps, step, None)


def give_back_last(ring: Ring, steps: int | jax.Array, before: jax.Array, pending: int | None = None) -> None:
    """Gives back the stages of a tile's last steps once they are done. pending: their number, where it is not what
    `run_steps` leaves in flight."""
    config = ring.problem.config
    if pending is None:
        pending = min(config.in_flight, steps) if isinstance(steps, int) else config.in_flight
    for late in range(pending, 0, -1):
        plgpu.barrier_arrive(ring.empty.at[lax.rem(before + steps - late, config.stages)])


def compute(
    problem: Problem,
    ring: Ring,
    stores: Sequence[Store],
    warpgroup: jax.Array,
    *,
    sharing: Sharing | None = None,
    sums: Sums | None = None,
) -> None:
    """Multiplies every tile and has its results stored.

    stores: of each result that lies beside others (see `Problem.widths`), or one.
    sharing, sums: how the last tiles are shared, and where their sums go.
    """
    config = problem.config
    rows = config.warpgroup_rows
    first_row = warpgroup * rows if config.split == "m" else 0

    def operands(stage, left, right, first_column, columns):
        a = ring.a[left].at[stage]
        b = ring.b[right].at[stage]
        if config.split == "m":
            a = a.at[_ordered(pl.ds(first_row, rows), slice(None), problem.transpose_a)]
        if columns != problem.columns:
            b = b.at[_ordered(slice(None), pl.ds(first_column, columns), problem.transpose_b)]
        a = a.transpose((1, 0)) if problem.transpose_a else a
        b = b.transpose((1, 0)) if problem.transpose_b else b
        return a, b

    skew = min(config.skew, config.stages - 1, problem.steps - 1) if config.warpgroups > 1 else 0
    if skew:
        # Each computing warpgroup but the first waits once, before its first tile.
        @pl.when(warpgroup > 0)
        def _():
            plgpu.barrier_wait(ring.ahead)

    every_step = Part(first=0, steps=problem.steps)

    def tile(row, column, columns, before, part=every_step):
        # ptxas must see that no loop over steps is empty: it would wait for each product.
        steps = part.steps if sums is None else jnp.maximum(part.steps, 1)
        first_column = 0
        if config.split == "n":
            columns //= config.warpgroups
            first_column = warpgroup * columns
        row, column = row + first_row, column + first_column
        own_stores = [store.narrowed(columns) for store in stores] if config.passes else stores
        if len(stores) == 1:
            _where(part.ends, partial(own_stores[0].begin, row, column))

        def multiply(*accumulators):
            def issue(i, stage):
                for left, right, accumulator in problem.products:
                    plgpu.wgmma(accumulators[accumulator], *operands(stage, left, right, first_column, columns))
                if skew:
                    plgpu.barrier_arrive(ring.ahead, predicate=(warpgroup == 0) & (before + i == skew - 1))

            if sums is not None:
                for accumulator, value in zip(accumulators, sums.fetch(part, accumulators), strict=True):
                    accumulator[...] = value
            run_steps(ring, issue, steps, before, products=len(problem.products))
            values = [accumulator[...] for accumulator in accumulators]
            give_back_last(ring, steps, before)
            if sums is not None:
                pl.when(~part.ends)(partial(sums.leave, part, values))
            if config.passes:
                # Widths need not be a multiple of what the buffers hold; the last tile's results left long ago.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if len(stores) == 1:
                _where(part.ends, partial(own_stores[0].finish, values, row, column))
                return
            for store, (is_own, first) in zip(own_stores, problem.owners(column), strict=True):
                pl.when(is_own)(partial(store.finish, values, row, column - first))

        types = (plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32) for _ in range(problem.accumulators))
        pl.run_scoped(multiply, *types)

    for_each_tile(problem, tile, sharing=sharing)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _where(condition: jax.Array | bool, work: Callable[[], None]) -> None:
    """Calls it under the condition, unless that is known to hold."""
    work() if condition is True else pl.when(condition)(work)
