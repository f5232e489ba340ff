"""The warpgroup of a block of the forward kernel that brings operands: see `mosaic_gpu`."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.forward.block import Block
from pallas_kernels.ops.attention.forward.config import ROWS
from pallas_kernels.ops.attention.forward.hidden import hidden_zero
from pallas_kernels.ops.attention.forward.schedule import divmod_of, rem_of


def bring_operands(block: Block, q_ref: Any, k_ref: Any, v_ref: Any) -> None:
    """Brings the operands of every tile, as early as there is room."""
    config, problem, barriers, buffers = block.config, block.problem, block.barriers, block.buffers

    def bring(name: str, ref, stages: int, index: jax.Array, place) -> None:
        slot = rem_of(index, stages)

        @pl.when(index >= stages)
        def _():
            plgpu.barrier_wait(barriers[f"{name}_empty"].at[slot])

        full = barriers[f"{name}_full"].at[slot]
        buffers[name].at(slot).bring(ref.at[place], full)
        if name == "k" and problem.masking.has_segments:
            numbers = block.extras["key_segments"].at[place[0], place[1]]
            plgpu.copy_gmem_to_smem(numbers, buffers["segments"].at[slot], full)

    def tile_of_queries(head, tile, count, part, before):
        batch, q_head = divmod_of(head, problem.heads)
        k_head = divmod_of(q_head, problem.group)[0]
        first, _, _, last = block.key_tiles(batch, tile, part)

        def step(i, _):
            place = (batch, pl.ds((last - 1 - i) * config.columns, config.columns), k_head)
            bring("k", k_ref, config.key_stages, before + i, place)

            @pl.when(i == 0)
            def _():
                for warpgroup in range(config.warpgroups):

                    @pl.when(count > 0)
                    def _(warpgroup=warpgroup):
                        plgpu.barrier_wait(barriers["q_empty"].at[warpgroup])

                    row = tile * config.rows + warpgroup * ROWS
                    place = q_ref.at[batch, pl.ds(row, ROWS), q_head]
                    buffers["q"].at(warpgroup).bring(place, barriers["q_full"].at[warpgroup])

            bring("v", v_ref, config.value_stages, before + i, place)

        steps = last - first
        if block.hides_steps:
            steps += hidden_zero()
        lax.fori_loop(jnp.int32(0), steps, step, None)
        return before + steps

    total = block.schedule.for_each(block.index, block.extras.get("table"), tile_of_queries, jnp.int32(0))

    # No barrier may be left with an arrival that nobody has seen.
    for name, stages in (("k", config.key_stages), ("v", config.value_stages)):

        def drain(i, _, name=name, stages=stages):
            plgpu.barrier_wait(barriers[f"{name}_empty"].at[rem_of(i, stages)])

        lax.fori_loop(jnp.maximum(total - stages, 0), total, drain, None)
    for warpgroup in range(config.warpgroups):
        plgpu.barrier_wait(barriers["q_empty"].at[warpgroup])
