"""A block of the forward kernel, and its producer, which loads operands by TMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.forward.config import ROWS, STAGES, ForwardConfig
from pallas_kernels.ops.attention.forward.schedule import Schedule, divmod_of, rem_of
from pallas_kernels.ops.attention.launch import hidden
from pallas_kernels.ops.attention.masking import TileRange
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.barriers import drain


@dataclass(frozen=True, kw_only=True)
class Block:
    """A running block; both roles use it.

    index: the block's number. extras: references to further arrays, by name. buffers, barriers: in shared memory, by
    name.
    """

    problem: Problem
    config: ForwardConfig
    schedule: Schedule
    index: jax.Array
    extras: dict[str, Any]
    buffers: dict[str, Any]
    barriers: dict[str, Any]

    @property
    def skips_tiles(self) -> bool:
        """Whether each consumer skips the block's last key tiles that its own queries do not see.

        With 192 queries a block and 128 keys a tile, a causal mask hides a tile from every other consumer on average:
        64 of the 128 hidden keys that each query would be multiplied by. The mask then cuts one tile of a consumer, not
        two, so that no loop over masked tiles takes registers (with masks from positions 156 bytes are spilled with it,
        none without).
        """
        config, masking = self.config, self.problem.masking
        has_end = masking.right is not None and masking.right % config.columns == 0 and not masking.has_segments
        return has_end and config.columns < config.rows

    def key_tiles(self, batch: jax.Array, tile: jax.Array) -> TileRange:
        """The key tiles of a query tile: at least one, which may be masked throughout, to have no special case."""
        masking, config = self.problem.masking, self.config
        if masking.has_segments:
            bounds = TileRange(*(self.extras["tiles"][batch, tile, i] for i in range(4)))
        else:
            bounds = masking.key_tiles(tile * config.rows, config.rows, config.columns)
        first, full_first, full_last, last = (jnp.asarray(bound, jnp.int32) for bound in bounds)
        tiles = -(-masking.keys // config.columns)
        first = jnp.minimum(first, tiles - 1)
        if masking.left is not None and masking.queries > masking.keys:
            # A window may lie behind the last key: its range is then empty, and beyond all tiles.
            last = jnp.minimum(last, tiles)
        return TileRange(first, full_first, full_last, jnp.maximum(last, first + 1))

    def steps(self, first: jax.Array, last: jax.Array) -> jax.Array:
        """The number of key tiles, hidden from LLVM where a loop of few steps that it unrolls would spill.

        Known, it makes two tiles of 8x256, 16 heads of 64, faster: 7.9 µs instead of 8.2.
        """
        is_tight = self.problem.in_panels or self.problem.head_size > 128 or self.config.warpgroups > 2
        return hidden(last - first) if is_tight else last - first


def load_operands(block: Block, q_ref: Any, k_ref: Any, v_ref: Any) -> None:
    """Runs the producer: loads the operands of every tile, as early as there is room."""
    config, problem, barriers, buffers = block.config, block.problem, block.barriers, block.buffers

    def load(name: str, ref, index: jax.Array, place) -> None:
        slot = rem_of(index, STAGES)
        pl.when(index >= STAGES)(lambda: plgpu.barrier_wait(barriers[f"{name}_empty"].at[slot]))
        full = barriers[f"{name}_full"].at[slot]
        buffers[name].at(slot).load_async(ref.at[place], full)
        if name == "k" and problem.masking.has_segments:
            numbers = block.extras["key_segments"].at[place[0], place[1]]
            plgpu.copy_gmem_to_smem(numbers, buffers["segments"].at[slot], full)

    def tile_of_queries(head, tile, count, before):
        batch, q_head = divmod_of(head, problem.heads)
        k_head = divmod_of(q_head, problem.group)[0]
        first, _, _, last = block.key_tiles(batch, tile)

        def step(i, _):
            place = (batch, pl.ds((last - 1 - i) * config.columns, config.columns), k_head)
            load("k", k_ref, before + i, place)

            @pl.when(i == 0)
            def _():
                for warpgroup in range(config.warpgroups):
                    pl.when(count > 0)(lambda i=warpgroup: plgpu.barrier_wait(barriers["q_empty"].at[i]))
                    row = tile * config.rows + warpgroup * ROWS
                    place = q_ref.at[batch, pl.ds(row, ROWS), q_head]
                    buffers["q"].at(warpgroup).load_async(place, barriers["q_full"].at[warpgroup])

            load("v", v_ref, before + i, place)

        steps = block.steps(first, last)
        lax.fori_loop(jnp.int32(0), steps, step, None)
        return before + steps

    total = block.schedule.for_each(block.index, block.extras.get("table"), tile_of_queries, jnp.int32(0))
    drain(barriers["k_empty"], STAGES, total)
    drain(barriers["v_empty"], STAGES, total)
    for warpgroup in range(config.warpgroups):
        plgpu.barrier_wait(barriers["q_empty"].at[warpgroup])
