"""The steps of a tile: the producer's TMA copies and the consumers' products, through a ring of stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.primitives.few_rows.weights import integer_tiles, load_integers
from pallas_kernels.primitives.integer_gemm.config import GROUP
from pallas_kernels.primitives.integer_gemm.packing import load_packed
from pallas_kernels.primitives.integer_gemm.problem import Problem
from pallas_kernels.primitives.integer_gemm.store import Store
from pallas_kernels.primitives.row_tiles import RowTiles

_PART = 64
"""The depth of a part, which is widened while the tensor cores multiply the part before."""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ring of operands in shared memory: each stage holds one tile of w and one of x.

    full: one barrier per stage, passed when both tiles have arrived.
    empty: one barrier per stage, passed when every consumer is done with the stage.
    """

    problem: Problem
    w: Any
    x: RowTiles
    full: Any
    empty: Any

    def stage(self, step: jax.Array) -> jax.Array:
        """Returns the stage of a step; steps are counted over all of the block's tiles."""
        return lax.rem(step, self.problem.config.stages)

    def wait_empty(self, step: jax.Array) -> None:
        """Waits until the previous step in this step's stage has released it."""
        plgpu.barrier_wait(self.empty.at[self.stage(step)])

    def release(self, step: jax.Array) -> None:
        """Releases the step's stage for another step's operands."""
        plgpu.barrier_arrive(self.empty.at[self.stage(step)])


def ring_types(problem: Problem, integers: DTypeLike) -> dict[str, Any]:
    """Returns the scratch types of `Ring`'s members."""
    config, stages = problem.config, problem.config.stages
    barrier = partial(plgpu.ClusterBarrier, collective_axes=("cluster",)) if config.cluster > 1 else plgpu.Barrier
    return {
        "w": integer_tiles((stages, config.columns, config.depth), jnp.dtype(integers)),
        "x": problem.x_form.scratch(stages, config.rows),
        "full": plgpu.Barrier(num_arrivals=1 + problem.x_form.copies, num_barriers=stages),
        "empty": barrier(num_arrivals=config.warpgroups, num_barriers=stages),
    }


def produce(ring: Ring, x_ref: Any, w_ref: Any) -> None:
    """Loads the operands of every step of every tile as soon as a stage is free."""
    problem, config = ring.problem, ring.problem.config

    def tile(row, column, before, rows):
        def step(i, _):
            stage = ring.stage(before + i)
            pl.when(before + i >= config.stages)(partial(ring.wait_empty, before + i))
            depth = pl.ds(i * config.depth, config.depth)
            full = ring.full.at[stage]
            plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(column, config.columns), depth], ring.w.at[stage], full)
            axes = "cluster" if config.cluster > 1 else None
            ring.x.at(stage, rows=pl.ds(0, rows)).load_async(x_ref.at[pl.ds(row, rows), depth], full, axes)

        lax.fori_loop(0, problem.steps, step, None)

    total = problem.for_each_tile(tile)
    # Every arrival at a barrier must be waited for.
    lax.fori_loop(jnp.maximum(total - config.stages, 0), total, lambda step, _: ring.wait_empty(step), None)


@dataclass(frozen=True, kw_only=True)
class _Products:
    """The products of one warpgroup in one tile. before: steps of the block's earlier tiles. rows: of the tile."""

    ring: Ring
    warpgroup: jax.Array
    before: jax.Array
    rows: int

    def make(self, accumulator: Any) -> None:
        make = self._in_parts if self.ring.problem.config.in_parts else self._whole_steps
        make(accumulator)
        plgpu.wgmma_wait(0)
        self._release(self.ring.problem.steps - 1)

    def _whole_steps(self, accumulator: Any) -> None:
        last = self.ring.problem.steps - 1

        def step(i, values):
            self._multiply(accumulator, values, i)
            later = self._integers(i + 1)  # while the tensor cores multiply
            plgpu.wgmma_wait(0)
            self._release(i)
            return later

        self._multiply(accumulator, lax.fori_loop(0, last, step, self._integers(0)), last)

    def _in_parts(self, accumulator: Any) -> None:
        problem, depth = self.ring.problem, self.ring.problem.config.depth
        # At least two parts per turn: a part's registers belong to its product until the next product has started.
        turn = max(1, 2 * _PART // depth)

        def steps(number, _):
            for i in range(turn):
                step = number * turn + i
                values = self._integers(step)
                for start in range(0, depth, _PART):
                    self._multiply(accumulator, values[:, start : start + _PART], step, start)
                    plgpu.wgmma_wait(1)
                    if start == 0:
                        pl.when(step > 0)(partial(self._release, step - 1))

        lax.fori_loop(0, problem.steps // turn, steps, None)

    def _integers(self, step: Any) -> jax.Array:
        problem, stage = self.ring.problem, self.ring.stage(self.before + step)
        plgpu.barrier_wait(self.ring.full.at[stage])
        ref = self.ring.w.at[stage, pl.ds(self.warpgroup * GROUP, GROUP)]
        return load_packed(ref) if problem.is_packed else load_integers(ref, problem.bits)

    def _multiply(self, accumulator: Any, values: jax.Array, step: Any, start: int = 0) -> None:
        tile, depth = self.ring.x.at(self.ring.stage(self.before + step), rows=pl.ds(0, self.rows)), values.shape[1]
        for first, panel in tile.panels(depth):
            if start <= first < start + depth:
                left = self.ring.problem.left(values[:, first - start : first - start + panel.shape[1]])
                plgpu.wgmma(accumulator, left, panel.transpose((1, 0)))

    def _release(self, step: Any) -> None:
        plgpu.commit_smem()  # orders the reads before TMA overwrites the stage
        self.ring.release(self.before + step)


def compute(ring: Ring, store: Store, warpgroup: jax.Array) -> None:
    """Multiplies and stores the warpgroup's columns of every tile of the block."""
    problem = ring.problem

    def tile(row, column, before, rows):
        column = column + warpgroup * GROUP
        vectors = store.vectors(column)
        products = _Products(ring=ring, warpgroup=warpgroup, before=before, rows=rows)

        def results(accumulator):
            products.make(accumulator)
            store.finish(accumulator[...], vectors, row, column)

        pl.run_scoped(results, plgpu.WGMMAAccumulatorRef((GROUP, rows), jnp.float32))

    problem.for_each_tile(tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
