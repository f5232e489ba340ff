"""The roles of the fused kernel: producer and consumer of a block that adds shares, and of a finisher."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import FUSED_KEYS, WARPGROUP_ROWS, WARPGROUPS, columns_at_once
from pallas_kernels.ops.attention.backward.fused_launch import FINISHED_TILES, PART, SHARES, STAGES, Block
from pallas_kernels.ops.attention.backward.tiles import Tile, not_invariant
from pallas_kernels.primitives.gemm.pipeline import drain
from pallas_kernels.primitives.row_tiles import multiply_across, multiply_down


def produce(block: Block) -> None:
    """Loads keys, values and the queries of each step, and adds the shares of dquery to their sums."""
    launch, scratch = block.launch, block.scratch
    place = block.lane.rows(block.first_key, FUSED_KEYS)
    scratch.k.load_async(block.inputs.key.at[place], scratch.held)
    scratch.v.load_async(block.inputs.value.at[place], scratch.held)

    if not launch.warps_apart:
        lax.fori_loop(0, jnp.minimum(block.steps, STAGES), lambda n, _: _load_queries(block, n), None)
        lax.fori_loop(0, block.steps, lambda n, _: _add_share(block, n), None)
        return

    def load_all():
        def one(n, _):
            pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(scratch.empty.at[lax.rem(n, STAGES)]))
            _load_queries(block, n)

        lax.fori_loop(0, block.steps, one, None)
        drain(scratch.empty, STAGES, block.steps)

    def add_shares(slot):
        count = lax.div(block.steps - slot + SHARES - 1, SHARES)
        lax.fori_loop(0, count, lambda i, _: _add_share(block, slot + i * SHARES), None)

    @plgpu.warp_map
    def _(warp):
        pl.when(warp == 0)(load_all)
        pl.when((warp > 0) & (warp <= SHARES))(lambda: add_shares(warp - 1))


def _load_queries(block: Block, n: Any) -> None:
    """Loads the n-th step's queries, with dout and rows."""
    inputs, scratch, launch, batch = block.inputs, block.scratch, block.launch, block.lane.batch
    stage = lax.rem(n, STAGES)
    head, query_tile = block.queries(n)
    place = pl.ds(query_tile * launch.rows, launch.rows)
    scratch.q.at(stage).load_async(inputs.query.at[batch, place, head], scratch.full.at[stage])
    scratch.do.at(stage).load_async(inputs.dout.at[batch, place, head], scratch.full.at[stage])
    rows = inputs.rows.at[batch, head, pl.ds(0, launch.lines), place]
    plgpu.copy_gmem_to_smem(rows, scratch.qrows.at[stage], scratch.full.at[stage])


def _add_share(block: Block, n: Any) -> None:
    """Adds the n-th step's share to its sum, and loads a later step's queries if no other warp does.

    Without finishers the last block of a query tile stores dquery instead.
    """
    scratch, launch, batch, turns = block.scratch, block.launch, block.lane.batch, block.turns
    stage, slot = lax.rem(n, STAGES), lax.rem(n, SHARES)
    head, query_tile = block.queries(n)
    turn = launch.turn(batch, head, query_tile)
    sums = [launch.part_of(block.outputs.sums, batch, head, query_tile, i) for i in range(WARPGROUPS)]
    is_last = jnp.asarray(block.is_last_of(query_tile, n >= block.full_steps))

    def await_others(count):
        plgpu.semaphore_wait(turns.at[turn], count, decrement=False, memory_scope="gpu")

    def fetch():
        # While this step's products are under way.
        await_others(block.tile)
        for i in range(WARPGROUPS):
            plgpu.copy_gmem_to_smem(sums[i], scratch.share.at[slot, i], launch.fetched_of(scratch, slot))

    if not launch.has_finishers:
        pl.when(is_last & (block.tile > 0))(fetch)
    if not launch.warps_apart:
        plgpu.barrier_wait(scratch.empty.at[stage])
        pl.when(n + STAGES < block.steps)(lambda: _load_queries(block, n + STAGES))
    plgpu.barrier_wait(scratch.made.at[slot])

    def put(reduction=None):
        for i in range(WARPGROUPS):
            plgpu.copy_smem_to_gmem(scratch.share.at[slot, i], sums[i], reduction_op=reduction)

    def add():
        # The key tiles that a query tile sees begin with the first: so many blocks add before this one.
        is_ordered = launch.problem.deterministic
        await_others(block.tile if is_ordered else jnp.minimum(block.tile, 1))
        pl.when(block.tile == 0)(put)
        pl.when(block.tile > 0)(lambda: put("add"))
        # The next block may add when this sum has arrived, not only been read.
        plgpu.wait_smem_to_gmem(0)

    def store():
        for i in range(WARPGROUPS):
            place = launch.part_of(block.outputs.dquery, batch, head, query_tile, jnp.full((), i, jnp.int32))
            scratch.done.send(slot, i, place)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    lax.cond(is_last, store, add) if not launch.has_finishers else add()
    plgpu.semaphore_signal(turns.at[turn], memory_scope="gpu")
    plgpu.barrier_arrive(scratch.taken.at[slot])


def consume(block: Block, warpgroup: Any) -> None:
    """Computes dkey and dvalue of a warpgroup's 64 keys, and its half of the block's shares of dquery."""
    scratch, launch, problem = block.scratch, block.launch, block.launch.problem
    copies = launch.form.copies
    plgpu.barrier_wait(scratch.held)

    def first() -> Any:
        """The warpgroup's first key in the block, computed at each use: LLVM compiles a captured value differently."""
        return warpgroup * WARPGROUP_ROWS

    def release(n: Any) -> None:
        plgpu.barrier_arrive(scratch.empty.at[lax.rem(n, STAGES)])

    def release_before(n: Any) -> None:
        """Frees the stage of the step before n, by a later step of that stage: n - 1 may be negative."""
        release(n + STAGES - 1)

    def meet() -> None:
        """Waits until both warpgroups are here."""
        plgpu.barrier_arrive(scratch.met)
        plgpu.barrier_wait(scratch.met)

    def step(n: Any, dk: Any, dv: Any, *, is_masked: bool) -> None:
        overlaps = launch.overlaps and not is_masked
        stage = lax.rem(n, STAGES)
        head, query_tile = block.queries(n, is_masked)
        parts = launch.score_parts(is_masked)
        width = launch.rows // parts
        plgpu.barrier_wait(scratch.full.at[stage])
        again = not_invariant(n) * WARPGROUP_ROWS
        own = pl.ds(first() + again, WARPGROUP_ROWS)
        both_ds = scratch.ds.at[lax.rem(n, 2)]

        def score_gradients(i, s, dp):
            rows, row = pl.ds(i * width, width), query_tile * launch.rows + i * width
            query, dout = scratch.q.at(stage, rows=rows), scratch.do.at(stage, rows=rows)
            multiply_across(s, scratch.k.at(rows=own), query)
            multiply_across(dp, scratch.v.at(rows=own), dout)
            if launch.lines == 3:
                places = scratch.qrows.at[stage, 2]
            else:
                places = block.inputs.rows.at[block.lane.batch, head, 2, pl.ds(row, width)]
            tile = Tile(
                problem=problem,
                query_axis=1,
                shape=(WARPGROUP_ROWS, width),
                batch=block.lane.batch,
                head=head,
                row=row,
                column=block.first_key + first(),
                places=places,
            )
            scores = plgpu.wgmma_accumulator_load(s, wait_n=copies)
            if overlaps and i == 0:
                # The last step's product for dkey is done, too.
                pl.when(n > 0)(lambda: release_before(n))
            lse = plgpu.load(scratch.qrows.at[stage, 0, rows], layout=tile.row_layout())
            weights, _ = tile.weights(scores, lse, is_masked=is_masked)
            multiply_down(dv, weights.astype(problem.dtype), dout)
            dweights = plgpu.wgmma_accumulator_load(dp, wait_n=copies)
            delta = plgpu.load(scratch.qrows.at[stage, 1, rows], layout=tile.row_layout())
            narrow = tile.score_gradients(weights, dweights, delta).astype(problem.dtype)
            both_ds.at[pl.ds(first(), WARPGROUP_ROWS), rows][...] = narrow
            return narrow

        accumulators = [plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, width), jnp.float32)] * 2
        narrows = [pl.run_scoped(partial(score_gradients, i), *accumulators) for i in range(parts)]
        plgpu.commit_smem()
        meet()

        def make_share(dq):
            own_ds = both_ds.at[:, pl.ds(warpgroup * PART, PART)] if launch.splits_rows else both_ds
            for start, keys in launch.made_columns(scratch.k.at(rows=pl.ds(again, FUSED_KEYS)), warpgroup):
                own_dq = dq if keys.shape[1] == PART else dq.at[:, pl.ds(start, keys.shape[1])]
                plgpu.wgmma(own_dq, own_ds.transpose((1, 0)), keys)
            for i, narrow in enumerate(narrows):
                multiply_down(dk, narrow, scratch.q.at(stage, rows=pl.ds(i * width, width)))
            # The producer gets the share while these products are under way.
            values = launch.own_columns(plgpu.wgmma_accumulator_load(dq, wait_n=parts * copies), warpgroup)
            _give_share(block, warpgroup, n, values, query_tile, is_masked=is_masked)
            if not overlaps:
                plgpu.wgmma_wait(0)
                release(n)

        pl.run_scoped(make_share, plgpu.WGMMAAccumulatorRef((PART, PART), jnp.float32))

    def all_steps(dk: Any, dv: Any) -> tuple[jax.Array, jax.Array]:
        lax.fori_loop(0, block.full_steps, lambda n, _: step(n, dk, dv, is_masked=False), None)
        if launch.overlaps:
            plgpu.wgmma_wait(0)
            pl.when(block.full_steps > 0)(lambda: release_before(block.full_steps))
        if block.visits.has_masked:
            lax.fori_loop(block.full_steps, block.steps, lambda n, _: step(n, dk, dv, is_masked=True), None)
        return dk[...], dv[...]

    accumulators = [plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, launch.size), jnp.float32)] * 2
    own_first = first()
    dk, dv = pl.run_scoped(all_steps, *accumulators)
    meet()  # the other warpgroup's products with keys are done, too
    own, columns = pl.ds(own_first, WARPGROUP_ROWS), columns_at_once(launch.size)
    own_k, own_v = scratch.k.at(rows=own), scratch.v.at(rows=own)
    own_k.store(dk * problem.scale, width=columns)
    own_v.store(dv, width=columns)
    plgpu.commit_smem()
    place = block.lane.result_rows(block.first_key + own_first, WARPGROUP_ROWS)
    own_k.send(block.outputs.gradients.dkey.at[place])
    own_v.send(block.outputs.gradients.dvalue.at[place])
    # No barrier may be left with an arrival that nobody has seen.
    taken, steps = scratch.taken, block.steps
    for i in range(SHARES):
        pl.when(steps > i)(lambda i=i: plgpu.barrier_wait(taken.at[lax.rem(steps - 1 - i, SHARES)]))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _give_share(block: Block, warpgroup: Any, n: Any, values: jax.Array, query_tile: Any, *, is_masked: bool) -> None:
    """Gives the producer a warpgroup's half of a share; or dquery, where the block is the last to add to it."""
    scratch, launch = block.scratch, block.launch
    slot = lax.rem(n, SHARES)
    pl.when(n >= SHARES)(lambda: plgpu.barrier_wait(scratch.taken.at[slot]))

    def give():
        scratch.share.at[slot, warpgroup][...] = values

    def finish():
        pl.when(block.tile == 0)(lambda: store(values))
        pl.when(block.tile > 0)(lambda: store(with_others(values)))

    def with_others(values):
        plgpu.barrier_wait(launch.fetched_of(scratch, slot))
        return values + scratch.share.at[slot, warpgroup][...]

    def store(total):
        # Other threads of the warpgroup read what this one overwrites.
        plgpu.commit_smem()
        scratch.done.store(slot, warpgroup, (total * launch.problem.scale).astype(launch.problem.dtype))

    is_last = block.is_last_of(query_tile, is_masked)
    pl.when(not is_last if isinstance(is_last, bool) else ~is_last)(give)
    pl.when(is_last)(finish)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.made.at[slot])


def _finished_tiles(block: Block, number: Any) -> tuple[Any, Callable[[Any], tuple[Any, Any, Any]]]:
    """The number of query tiles that a finisher takes, and a function from n to the n-th one's (batch, head, tile).

    Finishers come in the order of heads, and take a head's tiles from the last one down, as they are ready.
    """
    tiles, heads = block.launch.query_tiles, block.launch.problem.heads
    of_a_head = pl.cdiv(tiles, FINISHED_TILES)
    lane, i = lax.div(number, of_a_head), lax.rem(number, of_a_head)
    first = (of_a_head - 1 - i) * FINISHED_TILES
    count = jnp.minimum(tiles - first, FINISHED_TILES)
    batch, head = lax.div(lane, heads), lax.rem(lane, heads)
    return count, lambda n: (batch, head, first + count - 1 - n)


def produce_finished(block: Block, number: Any) -> None:
    """Loads the sums of a finisher's query tiles to shared memory, once all blocks have added to them."""
    launch, scratch = block.launch, block.scratch
    count, at = _finished_tiles(block, number)

    def step(n, _):
        slot = lax.rem(n, SHARES)
        pl.when(n >= SHARES)(lambda: plgpu.barrier_wait(scratch.made.at[slot]))
        batch, head, tile = at(n)
        adders = launch.masking.key_tiles(tile * launch.rows, launch.rows, FUSED_KEYS).last
        turn = block.turns.at[launch.turn(batch, head, tile)]
        plgpu.semaphore_wait(turn, adders, decrement=False, memory_scope="gpu")
        for i in range(WARPGROUPS):
            part = launch.part_of(block.outputs.sums, batch, head, tile, i)
            plgpu.copy_gmem_to_smem(part, scratch.share.at[slot, i], scratch.fetched.at[slot])

    lax.fori_loop(0, count, step, None)
    drain(scratch.made, SHARES, count)


def consume_finished(block: Block, number: Any, warpgroup: Any) -> None:
    """Scales, rounds and stores a warpgroup's half of a finisher's query tiles."""
    launch, scratch, dquery = block.launch, block.scratch, block.outputs.dquery
    count, at = _finished_tiles(block, number)

    def step(n, _):
        slot = lax.rem(n, SHARES)
        plgpu.barrier_wait(scratch.fetched.at[slot])
        total = scratch.share.at[slot, warpgroup][...]
        made = (total * launch.problem.scale).astype(dquery.dtype)
        plgpu.commit_smem()  # all threads have read
        scratch.done.store(slot, warpgroup, made)
        plgpu.commit_smem()
        scratch.done.send(slot, warpgroup, launch.part_of(dquery, *at(n), warpgroup))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(scratch.made.at[slot])

    lax.fori_loop(0, count, step, None)
