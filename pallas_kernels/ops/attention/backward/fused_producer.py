"""The producer of the fused kernel: it loads queries, and adds shares of dquery to their sums."""

from __future__ import annotations

from dataclasses import dataclass

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import FUSED_KEYS, WARPGROUPS
from pallas_kernels.ops.attention.backward.fused_launch import SHARES, STAGES, Block
from pallas_kernels.primitives.gemm.pipeline import drain


@dataclass(frozen=True)
class Producer:
    """The role in a block."""

    block: Block

    def run(self) -> None:
        """All of it."""
        block, scratch = self.block, self.block.scratch
        own = (block.b, pl.ds(block.first_key, FUSED_KEYS), block.key_head)
        scratch.k.load_async(block.inputs.key.at[own], scratch.held)
        scratch.v.load_async(block.inputs.value.at[own], scratch.held)

        if not block.launch.warps_apart:
            lax.fori_loop(0, jnp.minimum(block.steps, STAGES), lambda n, _: self._load(n), None)
            lax.fori_loop(0, block.steps, lambda n, _: self._step(n), None)
            return

        def add_own(slot):
            count = lax.div(block.steps - slot + SHARES - 1, SHARES)
            lax.fori_loop(0, count, lambda i, _: self._step(slot + i * SHARES), None)

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(self._load_all)
            pl.when((warp > 0) & (warp <= SHARES))(lambda: add_own(warp - 1))

    def _load(self, n) -> None:
        """The queries of a step."""
        block, inputs, scratch, launch = self.block, self.block.inputs, self.block.scratch, self.block.launch
        stage = lax.rem(n, STAGES)
        head, query_tile = block.walk.place(n)
        place = pl.ds(query_tile * launch.rows, launch.rows)
        scratch.q.at(stage).load_async(inputs.query.at[block.b, place, head], scratch.full.at[stage])
        scratch.do.at(stage).load_async(inputs.dout.at[block.b, place, head], scratch.full.at[stage])
        rows = inputs.rows.at[block.b, head, pl.ds(0, launch.lines), place]
        plgpu.copy_gmem_to_smem(rows, scratch.qrows.at[stage], scratch.full.at[stage])

    def _load_all(self) -> None:
        """Apart from the adding of shares."""
        empty, steps = self.block.scratch.empty, self.block.steps

        def one(n, _):
            pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(empty.at[lax.rem(n, STAGES)]))
            self._load(n)

        lax.fori_loop(0, steps, one, None)
        drain(empty, STAGES, steps)

    def _step(self, n) -> None:
        """Adds the share of a step when its turn has come, and loads a later step's queries."""
        block, scratch, launch = self.block, self.block.scratch, self.block.launch
        stage, slot = lax.rem(n, STAGES), lax.rem(n, SHARES)
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

        if not launch.has_finishers:
            pl.when(is_last & (block.tile > 0))(fetch)
        if not launch.warps_apart:
            plgpu.barrier_wait(scratch.empty.at[stage])
            pl.when(n + STAGES < block.steps)(lambda: self._load(n + STAGES))
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

        lax.cond(is_last, finish, give) if not launch.has_finishers else give()
        plgpu.semaphore_signal(block.turns.at[turn.place], memory_scope="gpu")
        plgpu.barrier_arrive(scratch.taken.at[slot])
