"""The consumer warpgroups, which multiply and store the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.primitives.gemm.pipeline import Ring, for_each_tile, ordered, release_last, run_steps
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.store import Store


def consume(problem: Problem, ring: Ring, stores: Sequence[Store], warpgroup: jax.Array) -> None:
    """Multiplies every tile of the block and stores its results.

    stores: one for each of `Problem.widths`.
    """
    first_row = warpgroup * problem.config.warpgroup_rows
    consumer = Consumer(problem=problem, ring=ring, stores=stores, first_row=first_row)
    for_each_tile(problem, consumer.tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """One consumer warpgroup. first_row: the first row of a tile that it computes."""

    problem: Problem
    ring: Ring
    stores: Sequence[Store]
    first_row: Any

    def tile(self, row: jax.Array, column: jax.Array, columns: int, before: jax.Array) -> None:
        """Multiplies and stores the warpgroup's rows of the tile at (row, column).

        columns: of each accumulator. before: the number of steps of the block's earlier tiles.
        """
        config, row = self.problem.config, row + self.first_row
        stores = [store.narrowed(columns) for store in self.stores] if config.passes else self.stores
        if len(stores) == 1:
            stores[0].begin(row, column)

        def multiply(*accumulators):
            issue = partial(self.issue, columns, accumulators)
            products = self.problem.accumulators * self.problem.a_form.panels
            run_steps(self.ring, issue, self.problem.steps, before, products=products)
            values = [accumulator[...] for accumulator in accumulators]
            release_last(self.ring, self.problem.steps, before)
            self._store(stores, values, row, column)

        shape = config.warpgroup_rows, columns
        types = (plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in range(self.problem.accumulators))
        pl.run_scoped(multiply, *types)

    def issue(self, columns: int, accumulators: Sequence[Any], _, stage: jax.Array) -> None:
        """Starts a step's products."""
        for accumulator, right in zip(accumulators, self.ring.b, strict=True):
            for a, b in self._operands(columns, stage, right):
                plgpu.wgmma(accumulator, a, b)

    def _operands(self, columns: int, stage: jax.Array, right: Any) -> Iterator[tuple[Any, Any]]:
        """Yields the warpgroup's rows of the left tile's panels, and the tile's columns of the right tile's."""
        problem, tile, b = self.problem, self.ring.a.at(stage), right.at[stage]
        if columns != problem.columns:
            b = b.at[ordered(slice(None), pl.ds(0, columns), problem.transpose_b)]
        rows = pl.ds(self.first_row, problem.config.warpgroup_rows)
        for start, panel in tile.panels():
            a = panel.at[ordered(rows, slice(None), problem.transpose_a)]
            depth = ordered(pl.ds(start, panel.shape[1]), slice(None), problem.transpose_b)
            own = b.at[depth] if problem.in_panels else b
            yield (
                a.transpose((1, 0)) if problem.transpose_a else a,
                own.transpose((1, 0)) if problem.transpose_b else own,
            )

    def _store(self, stores: Sequence[Store], values: Sequence[jax.Array], row: jax.Array, column: jax.Array) -> None:
        if self.problem.config.passes:
            # A width need not be a multiple of what the buffers hold, so the count of unfinished stores varies. Waiting
            # for all costs nothing: the last tile's results left long ago.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if len(stores) == 1:
            stores[0].finish(values, row, column)
            return
        for store, (is_own, first) in zip(stores, self.problem.owners(column), strict=True):
            pl.when(is_own)(partial(store.finish, values, row, column - first))
