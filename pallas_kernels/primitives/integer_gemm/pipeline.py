"""The steps of a tile: the producer's TMA copies and the consumers' products, through a ring of stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.barriers import drain
from pallas_kernels.primitives.gemm.pipeline import for_each_tile
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.integer_gemm.store import Store
from pallas_kernels.primitives.integers import load_integers, widened
from pallas_kernels.primitives.row_tiles import RowTiles, shared
from pallas_kernels.primitives.transposed import GROUP

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

    @classmethod
    def of(cls, problem: Problem, refs: Mapping[str, Any]) -> Ring:
        """Returns the ring of references to `scratch`."""
        return cls(problem=problem, **{**refs, "x": problem.a_form.tiles(refs["x"])})

    @staticmethod
    def scratch(problem: Problem, integers: jnp.dtype) -> dict[str, Any]:
        """Returns the scratch types of the members. integers: the weights' dtype."""
        config, stages = problem.config, problem.config.stages
        return {
            "w": shared((stages, *problem.b_block), integers),
            "x": problem.a_form.scratch(stages, config.tile_m),
            "full": plgpu.Barrier(num_arrivals=1 + problem.a_form.copies, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        }

    def stage(self, step: Any) -> jax.Array:
        """Returns the stage of a step; steps are counted over all of the block's tiles."""
        return lax.rem(step, self.problem.config.stages)


def produce(ring: Ring, x_ref: Any, w_ref: Any) -> None:
    """Loads the operands of every step of every tile as soon as a stage is free."""
    problem, config = ring.problem, ring.problem.config

    def tile(row, column, columns, before):
        def step(i, _):
            stage = ring.stage(before + i)
            pl.when(before + i >= config.stages)(lambda: plgpu.barrier_wait(ring.empty.at[stage]))
            depth, full = pl.ds(i * config.tile_k, config.tile_k), ring.full.at[stage]
            plgpu.copy_gmem_to_smem(w_ref.at[pl.ds(column, columns), depth], ring.w.at[stage], full)
            ring.x.at(stage).load_async(x_ref.at[pl.ds(row, config.tile_m), depth], full)

        lax.fori_loop(0, problem.steps, step, None)

    drain(ring.empty, config.stages, for_each_tile(problem, tile))


def compute(ring: Ring, store: Store, warpgroup: jax.Array) -> None:
    """Multiplies and stores the warpgroup's columns of every tile of the block."""

    def tile(row, column, _, before):
        column = column + warpgroup * GROUP
        vectors = store.vectors(column)

        def results(accumulator):
            _multiply(ring, warpgroup, before, accumulator)
            store.finish(accumulator[...], vectors, row, column)

        pl.run_scoped(results, plgpu.WGMMAAccumulatorRef((GROUP, ring.problem.config.tile_m), jnp.float32))

    for_each_tile(ring.problem, tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _multiply(ring: Ring, warpgroup: jax.Array, before: jax.Array, accumulator: Any) -> None:
    """Adds up a tile's products. Each part of a step is widened while the tensor cores multiply the part before.

    A loop iteration has at least two parts: a part's registers belong to its product until the next one has started.
    """
    problem, depth = ring.problem, ring.problem.config.tile_k
    unrolled = max(1, 2 * _PART // depth)

    def release(step):
        plgpu.commit_smem()  # orders the reads before TMA overwrites the stage
        plgpu.barrier_arrive(ring.empty.at[ring.stage(before + step)])

    def multiply(step):
        stage = ring.stage(before + step)
        plgpu.barrier_wait(ring.full.at[stage])
        values = load_integers(ring.w.at[stage, pl.ds(warpgroup * GROUP, GROUP)])
        for start, panel in ring.x.at(stage).panels(_PART):
            left = widened(values[:, start : start + _PART], problem.dtype)
            plgpu.wgmma(accumulator, left, panel.transpose((1, 0)))
            plgpu.wgmma_wait(1)
            if start == 0:
                pl.when(step > 0)(partial(release, step - 1))

    def steps(number, _):
        for i in range(unrolled):
            multiply(number * unrolled + i)

    lax.fori_loop(0, problem.steps // unrolled, steps, None)
    plgpu.wgmma_wait(0)
    release(problem.steps - 1)
