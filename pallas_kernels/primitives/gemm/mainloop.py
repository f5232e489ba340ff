"""The order of tiles, and the ring of stages through which their steps go from the producer to the tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.gemm.sharing import Sharing


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


def drain(barriers: Any, count: int, steps: jax.Array) -> None:
    """Waits once more for each of so many barriers that took turns over so many steps.

    No barrier may be left with an arrival that nobody has seen, and no block of a cluster may leave early.
    """

    def one(i, _):
        plgpu.barrier_wait(barriers.at[lax.rem(i, count)])

    lax.fori_loop(jnp.maximum(steps - count, 0), steps, one, None)


def ordered(first: Any, second: Any, is_transposed: bool) -> tuple[Any, Any]:
    """Two sizes or indices as the array lies in memory."""
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
