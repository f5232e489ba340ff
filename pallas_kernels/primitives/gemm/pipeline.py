"""The order of tiles, the producer, and the ring of stages between its TMA copies and the tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.barriers import drain
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.row_tiles import RowTiles, shared


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ring of operands in shared memory: each stage holds a tile of the left operand and of each right one.

    full: one barrier per stage, passed when all of the stage's tiles have arrived.
    empty: one barrier per stage, passed when every consumer is done with the stage.
    """

    problem: Problem
    a: RowTiles
    b: Sequence[Any]
    full: Any
    empty: Any

    @classmethod
    def of(cls, problem: Problem, refs: Mapping[str, Any]) -> Ring:
        """Returns the ring of references to the scratch of `ring_types`."""
        return cls(problem=problem, **{**refs, "a": problem.a_form.tiles(refs["a"])})


def ring_types(problem: Problem) -> dict[str, Any]:
    """Returns the scratch types of `Ring`'s members."""
    config, rights = problem.config, problem.accumulators
    barrier = plgpu.Barrier
    if config.cluster > 1:
        barrier = partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    return {
        "a": problem.a_form.scratch(config.stages, problem.a_block[0]),
        "b": [shared((config.stages, *problem.b_block), problem.dtype, swizzle=problem.swizzle) for _ in range(rights)],
        "full": plgpu.Barrier(num_arrivals=problem.a_form.copies + rights, num_barriers=config.stages),
        "empty": barrier(num_arrivals=config.warpgroups, num_barriers=config.stages),
    }


def for_each_tile(problem: Problem, work: Callable[..., None]) -> jax.Array:
    """Calls `work(row, column, columns, before)` for each tile of the block; returns the block's number of steps.

    row, column: the tile's first in the result, or in the results side by side (see `Problem.spans`).
    columns: columns of each accumulator in the tile.
    before: the number of steps of the block's earlier tiles.
    """
    config = problem.config
    rows, columns = problem.grid

    @plgpu.nd_loop((rows * columns,), collective_axes="block", init_carry=jnp.int32(0))
    def steps(info, carry):
        i, j = plgpu.planar_snake(info.index[0], (rows, columns), 0, min(config.group, rows))
        if config.cluster > 1:
            i = config.cluster * i + lax.axis_index("cluster")
        return for_each_of_strip(problem, partial(work, i * config.tile_m), j * sum(problem.strip), carry)

    return steps  # pyright: ignore[reportReturnType]: the decorator gives the last carry


def for_each_of_strip(problem: Problem, work: Callable[..., None], column: jax.Array, before: jax.Array) -> jax.Array:
    """Calls `work(column, columns, before)` for each tile of the strip at `column`; returns the steps so far."""
    steps = problem.steps

    def tiles(count, columns, column, before):
        def nth(n, _):
            work(column + n * columns, columns, before + n * steps)

        nth(0, None) if count == 1 else lax.fori_loop(0, count, nth, None)

    for columns, alike in groupby(problem.strip):
        count = len(list(alike))
        tiles(count, columns, column, before)
        column, before = column + count * columns, before + count * steps
    return before


def ordered(first: Any, second: Any, is_transposed: bool) -> tuple[Any, Any]:
    """Returns two sizes or indices in the order in which the array lies in memory."""
    return (second, first) if is_transposed else (first, second)


def produce(problem: Problem, a_refs: Sequence[Any], b_refs: Sequence[Any], ring: Ring) -> None:
    """Loads the operands of every step of every tile as soon as a stage is free."""
    producer = Producer(problem=problem, ring=ring, a=a_refs, b=b_refs)
    drain(ring.empty, problem.config.stages, for_each_tile(problem, producer.tile))


@dataclass(frozen=True, kw_only=True)
class Producer:
    """The producer.

    a, b: the operands in device memory. rows: of a left operand's tile that are loaded; None: all that exist.
    before_last_part: called with a tile's first row before the last of `Problem.depths` is loaded for it, or None.
    """

    problem: Problem
    ring: Ring
    a: Sequence[Any]
    b: Sequence[Any]
    rows: int | None = None
    before_last_part: Callable[[jax.Array], None] | None = None

    def free_stage(self, step: jax.Array) -> jax.Array:
        """Returns the stage of a step, once it is free; steps are counted over all of the block's tiles."""
        stages = self.problem.config.stages
        stage = lax.rem(step, stages)
        pl.when(step >= stages)(lambda: plgpu.barrier_wait(self.ring.empty.at[stage]))
        return stage

    def tile(self, row: jax.Array, column: jax.Array, _, before: jax.Array) -> None:
        """Loads the operands of a tile's steps."""
        config, steps = self.problem.config, self.problem.steps

        def step(i, _):
            stage = self.free_stage(before + i)
            place = i
            if config.reverses:
                is_odd = lax.rem(lax.div(before, steps), 2) == 1
                place = jnp.where(is_odd, steps - 1 - i, i)
            if not self.problem.depths:
                self.load(row, column, pl.ds(place * config.tile_k, config.tile_k), stage)
                return
            ends = self.problem.part_ends

            def load_part(part: int, first: int) -> None:
                if self.before_last_part is not None and part == len(ends) - 1:
                    self.before_last_part(row)
                depth = pl.ds((place - first) * config.tile_k, config.tile_k)
                self.load(row, column, depth, stage, slice(part, part + 1))

            for part, (first, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
                pl.when((place >= first) & (place < end))(partial(load_part, part, first))

        lax.fori_loop(0, steps, step, None)

    def load(self, row: jax.Array, column: jax.Array, depth: pl.Slice, stage: jax.Array, part=slice(None)) -> None:
        """Loads the operands of a step of the tile at (row, column). part: the operands, if they are several pairs."""
        self.load_left(self.a[part][0], row, depth, stage)
        self._load_right(self.b[part], column, depth, stage)

    def load_left(self, ref: Any, row: jax.Array, depth: pl.Slice, stage: jax.Array) -> None:
        """Loads the left operand of a step, for the tile rows from `row` on."""
        problem = self.problem
        most = problem.loaded_rows if self.rows is None else min(self.rows, problem.loaded_rows)
        whole = problem.transpose_a or most == problem.config.tile_m
        rows = problem.config.tile_m if whole else most
        index = ordered(pl.ds(row, rows), depth, problem.transpose_a)
        place = self.ring.a.at(stage) if whole else self.ring.a.at(stage, rows=pl.ds(0, rows))
        place.load_async(ref.at[index], self.ring.full.at[stage])

    def _load_right(self, refs: Sequence[Any], column: jax.Array, depth: pl.Slice, stage: jax.Array) -> None:
        problem, ring = self.problem, self.ring
        axes = "cluster" if problem.config.cluster > 1 else None

        def load(ref, buffer, column):
            index = ordered(depth, pl.ds(column, problem.columns), problem.transpose_b)
            plgpu.copy_gmem_to_smem(ref.at[index], buffer.at[stage], ring.full.at[stage], collective_axes=axes)

        if len(problem.widths) == 1:
            for ref, buffer in zip(refs, ring.b, strict=True):
                load(ref, buffer, column)
            return
        for ref, (is_own, first) in zip(refs, problem.owners(column), strict=True):
            pl.when(is_own)(partial(load, ref, ring.b[0], column - first))


def run_steps(
    ring: Ring,
    issue: Callable[[jax.Array, jax.Array], None],
    steps: int | jax.Array,
    before: jax.Array,
    *,
    products: int = 1,
) -> None:
    """Calls `issue(step, stage)` for each step of a tile, once its operands have arrived.

    A stage is released when its products are done. Products of the last steps may be unfinished at the end; see
    `release_last`.

    products: the number of products that `issue` starts.
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

    lax.fori_loop(0, steps, step, None)


def release_last(ring: Ring, steps: int | jax.Array, before: jax.Array) -> None:
    """Releases the stages of a tile's last steps, whose products are done by now."""
    config = ring.problem.config
    for late in range(min(config.in_flight, steps) if isinstance(steps, int) else config.in_flight, 0, -1):
        stage = ring.empty.at[lax.rem(before + steps - late + config.stages, config.stages)]
        if isinstance(steps, int):
            plgpu.barrier_arrive(stage)
        else:
            plgpu.barrier_arrive(stage, predicate=steps >= late)
