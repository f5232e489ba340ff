"""A consumer warpgroup of the fused kernel: scores, their gradients, and the products with these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import FUSED_KEYS, WARPGROUP_ROWS, columns_at_once
from pallas_kernels.ops.attention.backward.fused_launch import PART, SHARES, STAGES, Block
from pallas_kernels.ops.attention.backward.tiles import Tile, not_invariant
from pallas_kernels.ops.attention.row_tiles import multiply_across, multiply_down


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """The role in a block, for 64 of its keys."""

    block: Block
    warpgroup: jax.Array

    @property
    def _first(self) -> jax.Array:
        """Of the warpgroup's keys, in the block."""
        return self.warpgroup * WARPGROUP_ROWS

    def run(self) -> None:
        """All of it: dkey and dvalue of the keys, and the shares of dquery."""
        block, scratch, problem = self.block, self.block.scratch, self.block.launch.problem
        plgpu.barrier_wait(scratch.held)
        accumulators = [plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, block.launch.size), jnp.float32)] * 2
        first = self._first
        dk, dv = pl.run_scoped(self._all_steps, *accumulators)
        own = pl.ds(first, WARPGROUP_ROWS)
        # The other warpgroup's products with k are done, too.
        plgpu.barrier_arrive(scratch.met)
        plgpu.barrier_wait(scratch.met)
        own_k, own_v, columns = scratch.k.at(rows=own), scratch.v.at(rows=own), columns_at_once(block.launch.size)
        own_k.store(dk * problem.scale, width=columns)
        own_v.store(dv, width=columns)
        plgpu.commit_smem()
        place = (block.b, pl.ds(block.first_key + first, WARPGROUP_ROWS), block.key_head)
        place = place if block.part is None else (block.part, *place)
        own_k.send(block.outputs.gradients.dkey.at[place])
        own_v.send(block.outputs.gradients.dvalue.at[place])
        # No barrier may be left with an arrival that nobody has seen.
        taken, steps = scratch.taken, block.steps
        for i in range(SHARES):
            pl.when(steps > i)(lambda i=i: plgpu.barrier_wait(taken.at[lax.rem(steps - 1 - i, SHARES)]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _all_steps(self, dk: Any, dv: Any) -> tuple[jax.Array, jax.Array]:
        block = self.block
        step = partial(self._step, dk=dk, dv=dv)
        lax.fori_loop(0, block.full_steps, lambda n, _: step(n, False), None)
        if block.launch.overlaps:
            plgpu.wgmma_wait(0)
            pl.when(block.full_steps > 0)(lambda: self._release_before(block.full_steps))
        if not isinstance(block.visits.masked, int) or block.visits.masked:
            lax.fori_loop(block.full_steps, block.steps, lambda n, _: step(n, True), None)
        return dk[...], dv[...]

    def _release(self, n: Any) -> None:
        """The queries of a step, whose products are done."""
        plgpu.barrier_arrive(self.block.scratch.empty.at[lax.rem(n, STAGES)])

    def _release_before(self, n: Any) -> None:
        """Those of the step before, by a number of the same stage that is never negative."""
        self._release(n + STAGES - 1)

    def _step(self, n: Any, is_masked: bool, *, dk: Any, dv: Any) -> None:
        block, scratch, launch = self.block, self.block.scratch, self.block.launch
        copies = launch.form.copies
        overlaps = launch.overlaps and not is_masked
        stage = lax.rem(n, STAGES)
        head, query_tile = block.walk.place(n, is_masked)
        parts = launch.score_parts(is_masked)
        width = launch.rows // parts
        plgpu.barrier_wait(scratch.full.at[stage])
        again = not_invariant(n) * WARPGROUP_ROWS
        own = pl.ds(self._first + again, WARPGROUP_ROWS)
        both_ds = scratch.ds.at[lax.rem(n, 2)]

        def score_gradients(i, s, dp):
            rows, row = pl.ds(i * width, width), query_tile * launch.rows + i * width
            query, dout = scratch.q.at(stage, rows=rows), scratch.do.at(stage, rows=rows)
            multiply_across(s, scratch.k.at(rows=own), query)
            multiply_across(dp, scratch.v.at(rows=own), dout)
            tile = self._tile(head, row, width, stage)
            scores = plgpu.wgmma_accumulator_load(s, wait_n=copies)
            if overlaps and i == 0:
                # The last step's product for dkey is done, too.
                pl.when(n > 0)(lambda: self._release_before(n))
            lse = plgpu.load(scratch.qrows.at[stage, 0, rows], layout=tile.row_layout())
            weights, _ = tile.weights(scores, lse, is_masked=is_masked)
            multiply_down(dv, weights.astype(launch.problem.dtype), dout)
            dweights = plgpu.wgmma_accumulator_load(dp, wait_n=copies)
            delta = plgpu.load(scratch.qrows.at[stage, 1, rows], layout=tile.row_layout())
            narrow = tile.score_gradients(weights, dweights, delta).astype(launch.problem.dtype)
            both_ds.at[pl.ds(self._first, WARPGROUP_ROWS), rows][...] = narrow
            return narrow

        accumulators = [plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, width), jnp.float32)] * 2
        narrows = [pl.run_scoped(partial(score_gradients, i), *accumulators) for i in range(parts)]
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.met)
        plgpu.barrier_wait(scratch.met)

        def make_share(dq):
            own_ds = both_ds.at[:, pl.ds(self.warpgroup * PART, PART)] if launch.splits_rows else both_ds
            for start, keys in launch.made_columns(scratch.k.at(rows=pl.ds(again, FUSED_KEYS)), self.warpgroup):
                own_dq = dq if keys.shape[1] == PART else dq.at[:, pl.ds(start, keys.shape[1])]
                plgpu.wgmma(own_dq, own_ds.transpose((1, 0)), keys)
            for i, narrow in enumerate(narrows):
                multiply_down(dk, narrow, scratch.q.at(stage, rows=pl.ds(i * width, width)))
            # The share is handed on while these are under way.
            values = launch.own_columns(plgpu.wgmma_accumulator_load(dq, wait_n=parts * copies), self.warpgroup)
            self._give(n, values, head, query_tile, is_masked)
            if not overlaps:
                plgpu.wgmma_wait(0)
                self._release(n)

        pl.run_scoped(make_share, plgpu.WGMMAAccumulatorRef((PART, PART), jnp.float32))

    def _tile(self, head: Any, row: Any, width: int, stage: Any) -> Tile:
        """The scores of the warpgroup's keys and some of a step's queries."""
        block, launch, inputs = self.block, self.block.launch, self.block.inputs
        return Tile(
            problem=launch.problem,
            query_axis=1,
            shape=(WARPGROUP_ROWS, width),
            batch=block.b,
            head=head,
            row=row,
            column=block.first_key + self._first,
            places=block.scratch.qrows.at[stage, 2]
            if launch.lines == 3
            else inputs.rows.at[block.b, head, 2, pl.ds(row, width)],
        )

    def _give(self, n: Any, values: jax.Array, head: Any, query_tile: Any, is_masked: bool) -> None:
        """Hands on the share of a step; or makes dquery of it, and of the sum of the others', where it is the last."""
        block, scratch, launch = self.block, self.block.scratch, self.block.launch
        slot = lax.rem(n, SHARES)
        pl.when(n >= SHARES)(lambda: plgpu.barrier_wait(scratch.taken.at[slot]))

        def give():
            scratch.share.at[slot, self.warpgroup][...] = values

        def finish():
            pl.when(block.tile == 0)(lambda: store(values))
            pl.when(block.tile > 0)(lambda: store(with_others(values)))

        def with_others(values):
            plgpu.barrier_wait(launch.fetched_of(scratch, slot))
            return values + scratch.share.at[slot, self.warpgroup][...]

        def store(total):
            # Others of the warpgroup read what this one overwrites.
            plgpu.commit_smem()
            scratch.done.store(slot, self.warpgroup, (total * launch.problem.scale).astype(launch.problem.dtype))

        is_last = block.is_last_of(query_tile, is_masked)
        pl.when(not is_last if isinstance(is_last, bool) else ~is_last)(give)
        pl.when(is_last)(finish)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.made.at[slot])
