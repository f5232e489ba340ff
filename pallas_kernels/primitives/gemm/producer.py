"""The warpgroup that brings operands by TMA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.primitives.gemm.mainloop import Ring, drain, for_each_tile, ordered
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.sharing import Part, Sharing


def produce(
    problem: Problem, a_refs: Sequence[Any], b_refs: Sequence[Any], ring: Ring, *, sharing: Sharing | None = None
) -> None:
    """Brings the operands of every step of every tile, as early as there is room."""
    producer = _Producer(problem=problem, ring=ring, a=a_refs, b=b_refs)
    drain(ring.empty, problem.config.stages, for_each_tile(problem, producer.tile, sharing=sharing))


@dataclass(frozen=True, kw_only=True)
class _Producer:
    """a, b: the operands in device memory."""

    problem: Problem
    ring: Ring
    a: Sequence[Any]
    b: Sequence[Any]

    def tile(self, row: jax.Array, column: jax.Array, _, before: jax.Array, part: Part | None = None) -> None:
        """Brings what the block needs of the tile that begins there: every step, or a part of them."""
        part = part or Part(first=0, steps=self.problem.steps)
        stages = self.problem.config.stages

        def step(i, _):
            stage = lax.rem(before + i, stages)

            @pl.when(before + i >= stages)
            def _():
                plgpu.barrier_wait(self.ring.empty.at[stage])

            depth = self._depth(i, before, part)
            self._bring_left(row, depth, stage)
            self._bring_right(column, depth, stage)

        lax.fori_loop(0, part.steps, step, None)

    def _depth(self, i: jax.Array, before: jax.Array, part: Part) -> pl.Slice:
        """Of a part's step."""
        config, steps = self.problem.config, self.problem.steps
        place = part.first + i
        if config.reverses:
            is_odd = lax.rem(lax.div(before, steps), 2) == 1
            place = jnp.where(is_odd, steps - 1 - i, i)
        return pl.ds(place * config.tile_k, config.tile_k)

    def _bring_left(self, row: jax.Array, depth: pl.Slice, stage: jax.Array) -> None:
        problem, ring = self.problem, self.ring
        whole = problem.transpose_a or problem.brought_rows == problem.config.tile_m
        brought = problem.config.tile_m if whole else problem.brought_rows
        index = ordered(pl.ds(row, brought), depth, problem.transpose_a)
        sharers = "cluster" if problem.config.cluster == "n" else None
        for ref, buffer in zip(self.a, ring.a, strict=True):
            place = buffer.at[stage] if whole else buffer.at[stage, pl.ds(0, brought)]
            plgpu.copy_gmem_to_smem(ref.at[index], place, ring.full.at[stage], collective_axes=sharers)

    def _bring_right(self, column: jax.Array, depth: pl.Slice, stage: jax.Array) -> None:
        problem, ring = self.problem, self.ring
        sharers = "cluster" if problem.config.cluster == "m" else None

        def bring(ref, buffer, column):
            index = ordered(depth, pl.ds(column, problem.columns), problem.transpose_b)
            plgpu.copy_gmem_to_smem(ref.at[index], buffer.at[stage], ring.full.at[stage], collective_axes=sharers)

        if len(problem.widths) == 1:
            for ref, buffer in zip(self.b, ring.b, strict=True):
                bring(ref, buffer, column)
            return
        for ref, (is_own, first) in zip(self.b, problem.owners(column), strict=True):
            pl.when(is_own)(partial(bring, ref, ring.b[0], column - first))
