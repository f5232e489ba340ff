"""The warpgroups that multiply, and have their results stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.primitives.gemm.mainloop import Ring, for_each_tile, give_back_last, ordered, run_steps
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.sharing import Part, Sharing, Sums
from pallas_kernels.primitives.gemm.store import Store


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
    first_row = warpgroup * config.warpgroup_rows if config.split == "m" else 0
    skew = min(config.skew, config.stages - 1, problem.steps - 1) if config.warpgroups > 1 else 0
    if skew:
        # Each computing warpgroup but the first waits once, before its first tile.
        @pl.when(warpgroup > 0)
        def _():
            plgpu.barrier_wait(ring.ahead)

    consumer = _Consumer(
        problem=problem, ring=ring, stores=stores, warpgroup=warpgroup, first_row=first_row, skew=skew, sums=sums
    )
    for_each_tile(problem, consumer.tile, sharing=sharing)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """What a warpgroup has of a tile.

    row, column: its first ones in the result. first_column, columns: where it begins in a right operand's tile, and how
    many it has. before: steps of the block's earlier tiles. part: the tile's steps that are the block's. steps: their
    number. stores: of each result.
    """

    row: jax.Array
    column: jax.Array
    first_column: Any
    columns: int
    before: jax.Array
    part: Part
    steps: Any
    stores: Sequence[Store]


@dataclass(frozen=True, kw_only=True)
class _Consumer:
    """One warpgroup. first_row: of a tile's, that it has. skew: steps by which the first is ahead of the others."""

    problem: Problem
    ring: Ring
    stores: Sequence[Store]
    warpgroup: jax.Array
    first_row: Any
    skew: int
    sums: Sums | None

    def tile(
        self, row: jax.Array, column: jax.Array, columns: int, before: jax.Array, part: Part | None = None
    ) -> None:
        """Multiplies the tile that begins there, and stores what is complete."""
        config = self.problem.config
        part = part or Part(first=0, steps=self.problem.steps)
        # ptxas must see that no loop over steps is empty: it would wait for each product.
        steps = part.steps if self.sums is None else jnp.maximum(part.steps, 1)
        first_column = 0
        if config.split == "n":
            columns //= config.warpgroups
            first_column = self.warpgroup * columns
        tile = _Tile(
            row=row + self.first_row,
            column=column + first_column,
            first_column=first_column,
            columns=columns,
            before=before,
            part=part,
            steps=steps,
            stores=[store.narrowed(columns) for store in self.stores] if config.passes else self.stores,
        )
        if len(tile.stores) == 1:
            _where(part.ends, partial(tile.stores[0].begin, tile.row, tile.column))
        shape = config.warpgroup_rows, columns
        types = (plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in range(self.problem.accumulators))
        pl.run_scoped(partial(self._multiply, tile), *types)

    def _multiply(self, tile: _Tile, *accumulators: Any) -> None:
        if self.sums is not None:
            for accumulator, value in zip(accumulators, self.sums.fetch(tile.part, accumulators), strict=True):
                accumulator[...] = value
        issue = partial(self._issue, tile, accumulators)
        run_steps(self.ring, issue, tile.steps, tile.before, products=len(self.problem.products))
        values = [accumulator[...] for accumulator in accumulators]
        give_back_last(self.ring, tile.steps, tile.before)
        if self.sums is not None:
            pl.when(~tile.part.ends)(partial(self.sums.leave, tile.part, values))
        self._store(tile, values)

    def _issue(self, tile: _Tile, accumulators: Sequence[Any], i: jax.Array, stage: jax.Array) -> None:
        for left, right, accumulator in self.problem.products:
            plgpu.wgmma(accumulators[accumulator], *self._operands(tile, stage, left, right))
        if self.skew:
            is_ahead = (self.warpgroup == 0) & (tile.before + i == self.skew - 1)
            plgpu.barrier_arrive(self.ring.ahead, predicate=is_ahead)

    def _operands(self, tile: _Tile, stage: jax.Array, left: int, right: int) -> tuple[Any, Any]:
        """The warpgroup's rows and columns of two of the stage's tiles."""
        problem = self.problem
        a, b = self.ring.a[left].at[stage], self.ring.b[right].at[stage]
        if problem.config.split == "m":
            rows = pl.ds(self.first_row, problem.config.warpgroup_rows)
            a = a.at[ordered(rows, slice(None), problem.transpose_a)]
        if tile.columns != problem.columns:
            b = b.at[ordered(slice(None), pl.ds(tile.first_column, tile.columns), problem.transpose_b)]
        a = a.transpose((1, 0)) if problem.transpose_a else a
        b = b.transpose((1, 0)) if problem.transpose_b else b
        return a, b

    def _store(self, tile: _Tile, values: Sequence[jax.Array]) -> None:
        if self.problem.config.passes:
            # Widths need not be a multiple of what the buffers hold; the last tile's results left long ago.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if len(tile.stores) == 1:
            _where(tile.part.ends, partial(tile.stores[0].finish, values, tile.row, tile.column))
            return
        for store, (is_own, first) in zip(tile.stores, self.problem.owners(tile.column), strict=True):
            pl.when(is_own)(partial(store.finish, values, tile.row, tile.column - first))


def _where(condition: jax.Array | bool, work: Callable[[], None]) -> None:
    """Calls it under the condition, unless that is known to hold."""
    work() if condition is True else pl.when(condition)(work)
