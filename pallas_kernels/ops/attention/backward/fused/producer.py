"""What the warpgroup of the fused kernel does that computes nothing: it brings queries, and adds shares of dquery."""

from __future__ import annotations

from dataclasses import dataclass

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.fused.launch import COLUMNS, WARPGROUPS, Block


@dataclass(frozen=True)
class Adding:
    """The role in a block."""

    block: Block

    def run(self) -> None:
        """All of it."""
        block, scratch, config = self.block, self.block.scratch, self.block.launch.config
        own = (block.b, pl.ds(block.first_key, COLUMNS), block.key_head)
        scratch.k.bring(block.inputs.key.at[own], scratch.held)
        scratch.v.bring(block.inputs.value.at[own], scratch.held)

        if not config.warps_apart:
            lax.fori_loop(0, jnp.minimum(block.steps, config.stages), lambda n, _: self._bring(n), None)
            lax.fori_loop(0, block.steps, lambda n, _: self._step(n), None)
            return

        def add_own(slot):
            count = lax.div(block.steps - slot + config.shares - 1, config.shares)
            lax.fori_loop(0, count, lambda i, _: self._step(slot + i * config.shares), None)

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(self._bring_all)
            pl.when((warp > 0) & (warp <= config.shares))(lambda: add_own(warp - 1))

    def _bring(self, n) -> None:
        """The queries of a step."""
        block, inputs, scratch, launch = self.block, self.block.inputs, self.block.scratch, self.block.launch
        stage = lax.rem(n, launch.config.stages)
        head, query_tile = block.walk.place(n)
        place = pl.ds(query_tile * launch.rows, launch.rows)
        scratch.q.at(stage).bring(inputs.query.at[block.b, place, head], scratch.full.at[stage])
        scratch.do.at(stage).bring(inputs.dout.at[block.b, place, head], scratch.full.at[stage])
        rows = inputs.rows.at[block.b, head, pl.ds(0, launch.lines), place]
        plgpu.copy_gmem_to_smem(rows, scratch.qrows.at[stage], scratch.full.at[stage])

    def _bring_all(self) -> None:
        """Apart from the adding of shares."""
        stages, empty, steps = self.block.launch.config.stages, self.block.scratch.empty, self.block.steps

        def one(n, _):
            pl.when(n >= stages)(lambda: plgpu.barrier_wait(empty.at[lax.rem(n, stages)]))
            self._bring(n)

        # No barrier may be left with an arrival that nobody has seen.
        def drain(n, _):
            plgpu.barrier_wait(empty.at[lax.rem(n, stages)])

        lax.fori_loop(0, steps, one, None)
        lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

    def _step(self, n) -> None:
        """Adds the share of a step when its turn has come, and brings a later step's queries."""
        block, scratch, launch = self.block, self.block.scratch, self.block.launch
        config = launch.config
        stage, slot = lax.rem(n, config.stages), lax.rem(n, config.shares)
        turn = block.turn(n)
        head, query_tile = turn.head, turn.query_tile
        sums = [launch.part_of(block.outputs.sums, block.b, head, query_tile, i) for i in range(WARPGROUPS)]
        is_last = jnp.asarray(block.is_last_of(query_tile, n >= block.full_steps))

        def await_turn():
            plgpu.semaphore_wait(block.turns.at[turn.place], turn.before, decrement=False, memory_scope="gpu")

        def fetch():
            # While this step's products are under way.
            await_turn()
            for i in range(WARPGROUPS):
                plgpu.copy_gmem_to_smem(sums[i], scratch.share.at[slot, i], launch.fetched_of(scratch, slot))

        if not config.finishers:
            pl.when(is_last & (block.tile > 0))(fetch)
        if not config.warps_apart:
            plgpu.barrier_wait(scratch.empty.at[stage])
            pl.when(n + config.stages < block.steps)(lambda: self._bring(n + config.stages))
        plgpu.barrier_wait(scratch.made.at[slot])

        def put(reduction=None):
            for i in range(WARPGROUPS):
                plgpu.copy_smem_to_gmem(scratch.share.at[slot, i], sums[i], reduction_op=reduction)

        def give():
            await_turn()
            pl.when(turn.before == 0)(put)
            pl.when(turn.before > 0)(lambda: put("add"))
            # All is there, not only read.
            plgpu.wait_smem_to_gmem(0)

        def finish():
            for i in range(WARPGROUPS):
                place = launch.part_of(block.outputs.dquery, block.b, head, query_tile, jnp.full((), i, jnp.int32))
                scratch.done.send(slot, i, place)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        lax.cond(is_last, finish, give) if not config.finishers else give()
        plgpu.semaphore_signal(block.turns.at[turn.place], memory_scope="gpu")
        plgpu.barrier_arrive(scratch.taken.at[slot])
