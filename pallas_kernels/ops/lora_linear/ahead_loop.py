"""The steps of a block where a few blocks make x @ a for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.lora_linear.config import DEPTH
from pallas_kernels.ops.lora_linear.sharing import Sharing
from pallas_kernels.primitives.gemm.mainloop import Ring, drain, for_each_of_strip, give_back_last, run_steps
from pallas_kernels.primitives.gemm.problem import Problem
from pallas_kernels.primitives.gemm.store import Pieces, Store


@dataclass(frozen=True, kw_only=True)
class AheadLoop:
    """The steps of a block: those of its tiles of x @ a, then those of its tiles of the result.

    A step of x @ a brings a's rows into a buffer by which results leave later, filled up with zeros by TMA. Those
    buffers have barriers of their own, since there are not as many as stages.
    """

    problem: Problem
    sharing: Sharing
    pieces: Pieces
    alpha: float

    @property
    def own_steps(self) -> int:
        """Of x and w, or of x and a."""
        return self.problem.steps

    @property
    def steps(self) -> int:
        """Of a tile of the result: one more, of x @ a and b."""
        return self.own_steps + DEPTH // self.problem.config.tile_k

    @property
    def slots(self) -> int:
        """Buffers for a's rows."""
        return self.problem.config.warpgroups * self.pieces.slots

    def for_each(self, low: Callable[..., None], tile: Callable[..., None]) -> tuple[jax.Array, jax.Array]:
        """Calls low(row, tiles before) for the block's tiles of x @ a, then tile(row, column, width, steps before).

        Returns the numbers of all its steps and of those of x @ a.
        """
        config, sharing, block = self.problem.config, self.sharing, lax.axis_index("block")
        own = sharing.lows(block)
        lax.fori_loop(0, own, lambda n, _: low(sharing.low(block, n) * config.tile_m, n), None)
        low_steps = own * self.own_steps

        def unit(n, _):
            i, j = sharing.place(block, n, config.minor, config.group)
            before = low_steps + n * unit_steps
            work = partial(tile, i * config.tile_m)
            for_each_of_strip(self.problem, work, j * sum(self.problem.strip), before, self.steps)

        units, unit_steps = sharing.units_of(block), len(self.problem.strip) * self.steps
        lax.fori_loop(0, units, unit, None)
        return low_steps + units * unit_steps, low_steps

    def slot(self, step: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The buffer of a step's rows of a: its number and its place."""
        slot = lax.rem(step, self.slots)
        return slot, (lax.div(slot, self.pieces.slots), lax.rem(slot, self.pieces.slots))

    def produce(self, x_ref, w_ref, a_ref, b_ref, low_ref, given, ring: Ring, buffers: Any, emptied: Any) -> None:
        """Brings the operands of every step, as early as there is room."""
        config = self.problem.config
        depth = config.tile_k

        def room(step):
            stage = lax.rem(step, config.stages)
            pl.when(step >= config.stages)(lambda: plgpu.barrier_wait(ring.empty.at[stage]))
            return stage, ring.full.at[stage]

        def bring_left(ref, row, start, stage, full):
            plgpu.copy_gmem_to_smem(ref.at[pl.ds(row, config.tile_m), pl.ds(start, depth)], ring.a[0].at[stage], full)

        def low(row, tiles):
            def step(i, _):
                before = tiles * self.own_steps + i
                stage, full = room(before)
                bring_left(x_ref, row, i * depth, stage, full)
                slot, place = self.slot(before)
                pl.when(before >= self.slots)(lambda: plgpu.barrier_wait(emptied.at[slot]))
                # Not a number: columns behind a's last are meant to be brought, as zeros.
                columns = pl.ds(lax.mul(i, 0), self.pieces.columns)
                rows = a_ref.at[pl.ds(i * depth, depth), columns]
                plgpu.copy_gmem_to_smem(rows, buffers.at[place], full)

            lax.fori_loop(0, self.own_steps, step, None)

        def tile(row, column, _, before):
            columns = pl.ds(column, config.tile_n)

            def step(i, _):
                stage, full = room(before + i)

                def bring_right(ref, start):
                    rows = ref.at[pl.ds(start, depth), columns]
                    plgpu.copy_gmem_to_smem(rows, ring.b[0].at[stage], full)

                @pl.when(i < self.own_steps)
                def _():
                    bring_left(x_ref, row, i * depth, stage, full)
                    bring_right(w_ref, i * depth)

                @pl.when(i >= self.own_steps)
                def _():
                    bring_right(b_ref, (i - self.own_steps) * depth)
                    tile_of_rows = lax.div(row, config.tile_m)
                    plgpu.semaphore_wait(given.at[tile_of_rows], config.warpgroups, decrement=False, memory_scope="gpu")
                    bring_left(low_ref, row, (i - self.own_steps) * depth, stage, full)

            lax.fori_loop(0, self.steps, step, None)

        total, low_steps = self.for_each(low, tile)
        drain(ring.empty, config.stages, total)
        drain(emptied, self.slots, low_steps)

    def compute(
        self,
        low_ref: Any,
        given: Any,
        ring: Ring,
        buffers: Any,
        emptied: Any,
        met: Any,
        store: Store,
        warpgroup: jax.Array,
    ) -> None:
        """Multiplies every tile and stores it."""
        problem, config, pieces = self.problem, self.problem.config, self.pieces
        rows = config.warpgroup_rows
        first_row = warpgroup * rows
        own = pl.ds(first_row, rows)

        def multiplied(accumulator, right_of, steps, before, done_with=None):
            """The sum over so many steps. right_of: from a step of the tile and its stage to its right operand.
            done_with: is told of every step that is done."""

            def issue(i, stage):
                plgpu.wgmma(accumulator, ring.a[0].at[stage, own], right_of(i, stage))

            run_steps(ring, issue, steps, before, done_with=done_with)
            value = accumulator[...]
            give_back_last(ring, steps, before)
            return value

        def low(row, tiles):
            before = tiles * self.own_steps
            # Those of the last steps are given back when the result has left by one of them.
            kept = min(self.slots, self.own_steps)

            def give_back(step, predicate=None):
                plgpu.barrier_arrive(emptied.at[self.slot(before + step + self.slots)[0]], predicate=predicate)

            def multiply(accumulator):
                value = multiplied(
                    accumulator,
                    lambda i, _: buffers.at[self.slot(before + i)[1]],
                    self.own_steps,
                    before,
                    lambda done: give_back(done, (done >= 0) & (done < self.own_steps - kept)),
                )
                value = (value * self.alpha).astype(problem.dtype)
                # The other warpgroup's products may still read the buffer.
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)
                buffer = buffers.at[warpgroup, 0]
                buffer[...] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, low_ref.at[pl.ds(row + first_row, rows)])
                # All is there, not only read.
                plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(given.at[lax.div(row, config.tile_m)], memory_scope="gpu")
                for late in range(kept, 0, -1):
                    give_back(self.own_steps - late)

            pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((rows, pieces.columns), jnp.float32))

        def tile(row, column, width, before):
            def multiply(accumulator):
                def right_of(_, stage):
                    right = ring.b[0].at[stage]
                    return right if width == config.tile_n else right.at[:, pl.ds(0, width)]

                value = multiplied(accumulator, right_of, self.steps, before)
                # Widths need not be a multiple of what the buffers hold; the last tile's results left long ago.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store.narrowed(width).finish([value], row + first_row, column)

            pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((rows, width), jnp.float32))

        self.for_each(low, tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
