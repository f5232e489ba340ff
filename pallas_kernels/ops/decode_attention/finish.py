"""From the sums of a part's warpgroups to what leaves the block: the result, or a partial one for `combine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.decode_attention.config import ROWS, stored_columns
from pallas_kernels.ops.decode_attention.plan import Item, Plan

_LAYOUT = plgpu.Layout.WGMMA


def finish_types(plan: Plan) -> dict[str, Any]:
    """Scratch types of `Finish`'s members."""
    others, columns = plan.config.warpgroups - 1, stored_columns(plan.head_size)
    dtype = plan.dtype if plan.is_direct else jnp.float32
    types: dict[str, Any] = {"leaving": plgpu.SMEM((ROWS, columns), dtype)}
    if others:
        types["sums"] = plgpu.SMEM((others, ROWS, columns), jnp.float32)
        types["statistics"] = plgpu.SMEM((others, 2, ROWS), jnp.float32)
        types["given"] = plgpu.Barrier(num_barriers=others)
        types["taken"] = plgpu.Barrier(num_barriers=others)
    return types


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How a part ends: the first computing warpgroup adds the others' sums to its own, some columns at a time.

    sums, statistics: the others' columns, maxima and sums of weights, in shared memory; given and taken: barriers for
    them, one of each a warpgroup. leaving: what is on its way out. outputs: the result, or partial sums and statistics.
    """

    plan: Plan
    outputs: Sequence[Any]
    leaving: Any
    sums: Any = None
    statistics: Any = None
    given: Any = None
    taken: Any = None

    def give(self, other: jax.Array, sums: jax.Array, maximum: jax.Array, total: jax.Array) -> None:
        """What a warpgroup but the first has, number `other` of them."""
        self.statistics[other, 0], self.statistics[other, 1] = maximum, total
        for piece in self._pieces(sums):
            self.sums[other] = piece
            plgpu.barrier_arrive(self.given.at[other])
            plgpu.barrier_wait(self.taken.at[other])

    def take_and_store(self, item: Item, sums: jax.Array, maximum: jax.Array, total: jax.Array) -> None:
        """What the first one does with all."""
        pieces = self._pieces(sums)
        for other in range(self.plan.config.warpgroups - 1):
            pieces, maximum, total = self._added(other, pieces, maximum, total)
        if self.plan.is_direct:
            inverse = 1 / jnp.where(total == 0, 1.0, total)
            pieces = [piece * self._beside(inverse) for piece in pieces]
        else:
            for i, value in enumerate((maximum, total)):
                row = pl.ds(item.row_block * ROWS, ROWS)
                self.outputs[1][item.split, i, item.batch, item.head, row] = value
        for i, piece in enumerate(pieces):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.leaving[...] = piece.astype(self.leaving.dtype)
            plgpu.commit_smem()
            self._send(item, pl.ds(i * self._columns, self._columns))

    @property
    def _columns(self) -> int:
        return stored_columns(self.plan.head_size)

    def _pieces(self, sums: jax.Array) -> list[jax.Array]:
        return [sums[:, column : column + self._columns] for column in range(0, self.plan.head_size, self._columns)]

    def _beside(self, rows: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(rows, (ROWS, self._columns), (0,))

    def _added(self, other: int, pieces, maximum, total):
        added = []
        own_factor, other_factor = maximum, maximum
        for piece in pieces:
            plgpu.barrier_wait(self.given.at[other])
            if not added:
                theirs, their_total = (
                    plgpu.load(self.statistics.at[other, i], layout=_LAYOUT.reduce(1), optimized=False) for i in (0, 1)
                )
                highest = jnp.maximum(maximum, theirs)
                own_factor, other_factor = (
                    jnp.exp2((value - highest) * self.plan.scores.factor) for value in (maximum, theirs)
                )
                maximum, total = highest, total * own_factor + their_total * other_factor
            their_piece = plgpu.load(self.sums.at[other], layout=_LAYOUT, optimized=False)
            plgpu.barrier_arrive(self.taken.at[other])
            added.append(piece * self._beside(own_factor) + their_piece * self._beside(other_factor))
        return added, maximum, total

    def _send(self, item: Item, columns) -> None:
        """Of `leaving` only the rows that there are."""
        plan = self.plan
        if plan.is_direct:
            heads = pl.ds(item.head * plan.group, plan.group)
            for token in range(plan.tokens):
                rows = self.leaving.at[pl.ds(token * plan.group, plan.group)]
                plgpu.copy_smem_to_gmem(rows, self.outputs[0].at[item.batch, token, heads, columns])
            return
        rows = min(ROWS, plan.rows)
        place = (item.split, item.batch, item.head, pl.ds(item.row_block * ROWS, rows), columns)
        plgpu.copy_smem_to_gmem(self.leaving.at[pl.ds(0, rows)], self.outputs[0].at[place])
