"""A block of the forward kernel and its two roles: a producer loads operands by TMA, consumers compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.forward.config import ROWS, STAGES, ForwardConfig
from pallas_kernels.ops.attention.forward.schedule import Schedule
from pallas_kernels.ops.attention.launch import Lane, hidden, not_invariant
from pallas_kernels.ops.attention.masking import Side, TileRange
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.ops.attention.scores import Scores
from pallas_kernels.primitives.barriers import drain
from pallas_kernels.primitives.exponents import LOG2_E, LOWEST_SCORE
from pallas_kernels.primitives.row_tiles import columns_from, multiply_across, multiply_down


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
            bounds = TileRange.of(self.extras["tiles"], batch, tile)
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
        slot = lax.rem(index, STAGES)
        pl.when(index >= STAGES)(lambda: plgpu.barrier_wait(barriers[f"{name}_empty"].at[slot]))
        full = barriers[f"{name}_full"].at[slot]
        buffers[name].at(slot).load_async(ref.at[place], full)
        if name == "k" and problem.masking.has_segments:
            numbers = block.extras["key_segments"].at[place[0], place[1]]
            plgpu.copy_gmem_to_smem(numbers, buffers["segments"].at[slot], full)

    def tile_of_queries(head, tile, count, before):
        batch, q_head = Lane.of(head, problem.heads)
        k_head = lax.div(q_head, problem.group)
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


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """A consumer warpgroup: products with 64 queries, and the online softmax between them.

    warpgroup: its number in the block.
    """

    block: Block
    warpgroup: jax.Array

    def run(self, results: Any) -> None:
        """Computes and stores the output and log-sum-exp of the warpgroup's queries in each of the block's tiles."""
        block, config, problem = self.block, self.block.config, self.block.problem
        scores = Scores(problem=problem, columns=config.columns, extras=block.extras)
        if "turn" in block.barriers:
            # The first warpgroup's first turn.
            plgpu.barrier_arrive(block.barriers["turn"].at[0], predicate=self.warpgroup == config.warpgroups - 1)

        def tile_of_queries(head, tile, count, before):
            del count
            accumulators = (
                plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32) for width in (problem.value_size, config.columns)
            )
            run = partial(self._tile, scores, head, tile, before)
            out, total, maximum, steps = pl.run_scoped(run, *accumulators)
            self._store(head, tile, out, total, maximum, results)
            return before + steps

        block.schedule.for_each(block.index, block.extras.get("table"), tile_of_queries, jnp.int32(0))
        if "turn" in block.barriers:
            pl.when(self.warpgroup == 0)(lambda: plgpu.barrier_wait(block.barriers["turn"].at[0]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _tile(self, scores: Scores, head, tile, before, o_ref, s_ref):
        """Returns the unnormalised output, the sums of weights, the maxima, and the number of key tiles visited."""
        block, warpgroup = self.block, self.warpgroup
        config, problem, barriers, buffers = block.config, block.problem, block.barriers, block.buffers
        batch, q_head = Lane.of(head, problem.heads)
        row = tile * config.rows + warpgroup * ROWS
        first, full_first, full_last, last = block.key_tiles(batch, tile)
        skipped = jnp.int32(0)
        if block.skips_tiles:
            own_last = problem.masking.key_tiles(row, ROWS, config.columns).last
            skipped = last - jnp.clip(own_last, first + 1, last)
        zeros = partial(jnp.full, fill_value=0.0, dtype=jnp.float32)

        def start_scores(index) -> jax.Array:
            slot = lax.rem(index, STAGES)
            plgpu.barrier_wait(barriers["k_full"].at[slot])
            s_ref[...] = plgpu.layout_cast(zeros((ROWS, config.columns)), plgpu.Layout.WGMMA)
            place = warpgroup + not_invariant(index)
            queries = buffers["q"].at(place) if own_queries is None else own_queries
            multiply_across(s_ref, queries, buffers["k"].at(slot))
            return slot

        def start_output(index, weights, factor) -> jax.Array:
            slot = lax.rem(index, STAGES)
            out = plgpu.wgmma_accumulator_load(o_ref, wait_n=None)
            o_ref[...] = out * lax.broadcast_in_dim(factor, out.shape, (0,))
            plgpu.barrier_wait(barriers["v_full"].at[slot])
            multiply_down(o_ref, weights, buffers["v"].at(slot))
            return slot

        row_segments = None
        if problem.masking.has_segments:
            numbers = block.extras["query_segments"].at[batch, pl.ds(row, ROWS)]
            row_segments = plgpu.load(numbers, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

        has_sides = problem.masking.has_sides(config.rows, config.columns)

        def seen_scores(index, slot, *, is_masked: bool, wait_n: int, side: Side = "right") -> jax.Array:
            """Waits for the product in `s_ref`, frees the keys' slot, and returns the scores, masked."""
            column = (last - 1 - index) * config.columns
            value = plgpu.wgmma_accumulator_load(s_ref, wait_n=wait_n)
            reads_segments = is_masked and row_segments is not None
            if not reads_segments:
                plgpu.barrier_arrive(barriers["k_empty"].at[slot])
            value = scores.scaled(value, batch, q_head, row, column)
            segments = None
            if is_masked and row_segments is not None:
                numbers = buffers["segments"].at[slot]
                segments = row_segments, plgpu.load(numbers, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            if is_masked:
                value = scores.masked(value, row, column, segments, side if has_sides else None)
            if reads_segments:
                plgpu.commit_smem()
                plgpu.barrier_arrive(barriers["k_empty"].at[slot])
            return value

        def softmax(value, maximum, total, index):
            column = (last - 1 - index) * config.columns
            new = jnp.maximum(maximum, jnp.max(value, axis=1) * scores.factor)
            factor = jnp.exp2(maximum - new)
            weights = jnp.exp2(value * scores.factor - lax.broadcast_in_dim(new, value.shape, (0,)))
            total = total * factor + jnp.sum(weights, axis=1)
            weights = scores.dropped(weights, batch, q_head, row, column)
            return weights, new, total, factor

        def step(i, carry, *, is_masked: bool, side: Side = "right"):
            maximum, total, weights, factor = carry
            self._await_turn()
            k_slot = start_scores(before + i)
            v_slot = start_output(before + i - 1, weights, factor)
            self._pass_turn()
            # The softmax runs beside the product with values, as far as ptxas does not move it behind the wait below.
            value = seen_scores(i, k_slot, is_masked=is_masked, wait_n=buffers["v"].form.copies, side=side)
            weights, maximum, total, factor = softmax(value, maximum, total, i)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(barriers["v_empty"].at[v_slot])
            return maximum, total, weights.astype(problem.dtype), factor

        plgpu.barrier_wait(barriers["q_full"].at[warpgroup])
        own_queries = None
        if config.queries_in_registers:
            own_queries = buffers["q"].at(warpgroup).load()
            if config.own_output:
                plgpu.commit_smem()  # what was read may then be overwritten by TMA
                plgpu.barrier_arrive(barriers["q_empty"].at[warpgroup])
        maximum, total = LOWEST_SCORE, 0.0
        if problem.has_sinks:
            sink = block.extras["sinks"][q_head] * LOG2_E
            maximum = jnp.maximum(sink, LOWEST_SCORE)
            total = jnp.exp2(sink - maximum)
        maximum, total = (
            plgpu.layout_cast(zeros((ROWS,), fill_value=value), plgpu.Layout.WGMMA.reduce(1))
            for value in (maximum, total)
        )
        if block.skips_tiles:
            lax.fori_loop(jnp.int32(0), skipped, lambda i, _: self._skip(before + i), None)
        # The mask may cut the first tile: its elements are compared wherever there is a mask at all.
        self._await_turn()
        k_slot = start_scores(before + skipped)
        self._pass_turn()
        value = seen_scores(skipped, k_slot, is_masked=True, wait_n=0)
        weights, maximum, total, factor = softmax(value, maximum, total, skipped)
        carry = (maximum, total, weights.astype(problem.dtype), factor)

        # Steps count from the last key tile: those before `cut` come after the full tiles.
        steps = block.steps(first, last)
        cut = skipped + 1
        if self._many_masked_after:
            cut = jnp.maximum(last - full_last, 1)
            carry = lax.fori_loop(jnp.int32(1), cut, partial(step, is_masked=True), carry)
        full_steps = jnp.maximum(last - full_first, cut) if problem.masking.masks_before else steps
        carry = lax.fori_loop(cut, full_steps, partial(step, is_masked=False), carry)
        if problem.masking.masks_before:
            carry = lax.fori_loop(full_steps, steps, partial(step, is_masked=True, side="left"), carry)
        maximum, total, weights, factor = carry
        if config.own_output and not config.queries_in_registers:
            plgpu.barrier_arrive(barriers["q_empty"].at[warpgroup])
        v_slot = start_output(before + steps - 1, weights, factor)
        out = o_ref[...]
        plgpu.barrier_arrive(barriers["v_empty"].at[v_slot])
        return out, total, maximum, steps

    @property
    def _many_masked_after(self) -> bool:
        """Whether the mask may cut more key tiles after the full ones than the last one."""
        masking, config = self.block.problem.masking, self.block.config
        if masking.has_segments:
            return True
        if masking.right is None:
            return False
        rows = ROWS if self.block.skips_tiles else config.rows
        return not (masking.right % config.columns == 0 and config.columns % rows == 0)

    def _skip(self, index: jax.Array) -> None:
        """Frees a tile of keys and values that the warpgroup's queries do not see."""
        barriers, slot = self.block.barriers, lax.rem(index, STAGES)
        self._await_turn()
        self._pass_turn()
        for name in ("k", "v"):
            # Before its tile has arrived, a slot may still be in use by other warpgroups.
            plgpu.barrier_wait(barriers[f"{name}_full"].at[slot])
            plgpu.barrier_arrive(barriers[f"{name}_empty"].at[slot])

    def _store(self, head, tile, out, total, maximum, results) -> None:
        config, problem, buffers = self.block.config, self.block.problem, self.block.buffers
        warpgroup = self.warpgroup
        batch, q_head = Lane.of(head, problem.heads)
        row = tile * config.rows + warpgroup * ROWS
        is_empty = total == 0.0
        safe = jnp.where(is_empty, 1.0, total)
        inverse = jnp.where(is_empty, 0.0, 1.0 / (safe * (1 - problem.dropout_rate)))
        lse = maximum * (1 / LOG2_E) + jnp.log(safe)
        lse = jnp.where(is_empty, -jnp.inf, lse)
        out = out * lax.broadcast_in_dim(inverse, out.shape, (0,))
        buffer = buffers["out" if config.own_output else "q"].at(warpgroup)
        rows = pl.ds(row, ROWS)
        out_place, lse_place = results[0].at[batch, rows, q_head], results[1].at[batch, q_head, rows]
        width = problem.value_size // config.output_parts
        for start in range(0, problem.value_size, width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer.store(out if width == problem.value_size else out[:, start : start + width])
            if start == 0:
                buffers["lse"].at[warpgroup][...] = lse
            plgpu.commit_smem()
            buffer.send(out_place if width == problem.value_size else out_place.at[:, columns_from(start, width)])
            if start == 0:
                plgpu.copy_smem_to_gmem(buffers["lse"].at[warpgroup], lse_place)
        if not config.own_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.block.barriers["q_empty"].at[warpgroup])

    def _await_turn(self) -> None:
        if "turn" in self.block.barriers:
            plgpu.barrier_wait(self.block.barriers["turn"].at[self.warpgroup])

    def _pass_turn(self) -> None:
        if "turn" in self.block.barriers:
            following = lax.rem(self.warpgroup + 1, self.block.config.warpgroups)
            plgpu.barrier_arrive(self.block.barriers["turn"].at[following])
