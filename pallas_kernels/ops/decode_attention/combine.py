"""Combines the sums of a block's consumers, and, in a small second kernel, the parts of a sequence."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.decode_attention.plan import ROWS, Item, Plan, stored_columns
from pallas_kernels.primitives import settings

_LAYOUT = plgpu.Layout.WGMMA


def finish_types(plan: Plan) -> dict[str, Any]:
    """The scratch types of `Finish`'s fields."""
    others, columns = plan.warpgroups - 1, stored_columns(plan.head_size)
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
    """The end of a part: the first consumer adds the others' sums to its own, some columns at a time, and stores them.

    sums, statistics: the others' columns, maxima and sums of weights, in shared memory. given, taken: their barriers,
    one of each for each other consumer. leaving: the columns that are being stored. outputs: the result, or partial
    sums and statistics.
    """

    plan: Plan
    outputs: Sequence[Any]
    leaving: Any
    sums: Any = None
    statistics: Any = None
    given: Any = None
    taken: Any = None

    def give(self, other: jax.Array, sums: jax.Array, maximum: jax.Array, total: jax.Array) -> None:
        """Passes the sums of another consumer, number `other`, to the first one."""
        self.statistics[other, 0], self.statistics[other, 1] = maximum, total
        for piece in self._pieces(sums):
            self.sums[other] = piece
            plgpu.barrier_arrive(self.given.at[other])
            plgpu.barrier_wait(self.taken.at[other])

    def take_and_store(self, item: Item, sums: jax.Array, maximum: jax.Array, total: jax.Array) -> None:
        """Adds the others' sums to the first consumer's, and stores the result."""
        pieces = self._pieces(sums)
        for other in range(self.plan.warpgroups - 1):
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
        """Stores the rows of `leaving` that are not padding."""
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


def combine(plan: Plan, partial: jax.Array, statistics: jax.Array) -> jax.Array:
    """Returns the output, (B, T, N, D); zeros where no key was seen.

    partial: (parts, B, K, rows, head size rounded up to 128) float32, sums of weighted values. statistics: (parts, 2,
    B, K, at least rows) float32, maxima of scores and sums of weights. Row t * group + g has token t and head g of the
    group.
    """
    (parts, batch, heads, _, width), group, factor = partial.shape, plan.group, plan.scores.factor
    tokens, head_size, dtype = plan.tokens, plan.head_size, plan.dtype

    def decode_attention_combine(partial_ref, statistics_ref, out_ref, *buffer):
        sequence, head, row = (lax.axis_index(name) for name in ("batch", "head", "row"))
        place = (sequence, head, row)
        result_ref = out_ref.at[sequence, row // group, head * group + lax.rem(row, group)]
        values = [plgpu.load(partial_ref.at[(part, *place)], optimized=False) for part in range(parts)]
        maxima = [statistics_ref[(part, 0, *place)] for part in range(parts)]
        totals = [statistics_ref[(part, 1, *place)] for part in range(parts)]
        highest = functools.reduce(jnp.maximum, maxima)
        shrinks = [jnp.exp2((maximum - highest) * factor) for maximum in maxima]
        total = sum(shrink * part for shrink, part in zip(shrinks, totals, strict=True))
        inverse = 1 / jnp.where(total == 0, 1.0, total)
        result = (sum(value * shrink for value, shrink in zip(values, shrinks, strict=True)) * inverse).astype(dtype)
        if not buffer:
            result_ref[...] = result
            return
        buffer[0][...] = result
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer[0].at[pl.ds(0, head_size)], result_ref)
        plgpu.wait_smem_to_gmem(0)

    return settings.kernel(
        decode_attention_combine,
        out_type=jax.ShapeDtypeStruct((batch, tokens, heads * group, head_size), dtype),
        grid=(tokens * group, heads, batch),
        grid_names=("row", "head", "batch"),
        scratch_types=() if width == head_size else (plgpu.SMEM((width,), dtype),),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(partial, statistics)
