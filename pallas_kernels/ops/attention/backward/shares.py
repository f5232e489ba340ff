"""dquery in the kernel by keys, which then computes scores once: five products a tile instead of seven.

A block also multiplies its score gradients by its keys. That product is the block's share of dquery. The producer adds
it by TMA to a float32 array in device memory. The blocks that share queries add in the order of their keys, each one
waiting for the one before it: sums do not depend on the order in which blocks run. The first one stores its share, so
that no sum need be zeroed before; the last one stores dquery instead of a sum, or further blocks, the finishers,
compute dquery from the sums. A block visits query tiles from the last one down, as do those that it waits for, all of
which were launched before it: so the first of the running blocks never waits, and none waits for ever.

If the problem is not deterministic, a block adds as soon as the first one has stored its share: the first signal is
that one's, as all others wait for it. Only who stores dquery, the last block or a finisher, waits for all. Each waits
for some of the blocks that it waits for otherwise, all launched before it (`block_place` numbers a lane's tiles in
order, in each section), so that none waits for ever here either.

Finishers come last, so that they run where the last round of the others leaves multiprocessors free: of 1024 blocks of
as much work each, 132 at a time, the last 100 leave 32 multiprocessors free for an eighth of the launch. A second
kernel behind all of them would take its time in addition.

Sources: the backward pass of Shah et al., "FlashAttention-3", 2024, https://arxiv.org/abs/2407.08608; queries from the
last one down: Qiang et al., "DASH: Deterministic Attention Scheduling", 2026, https://arxiv.org/abs/2601.21824
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward.config import WARPGROUPS
from pallas_kernels.ops.attention.backward.keys_launch import FINISHED_TILES, PART, SHARES, Block
from pallas_kernels.primitives.barriers import drain, fence
from pallas_kernels.primitives.row_tiles import RowTiles


def produce(block: Block, load_all: Callable[[], None], load: Callable[[Any], None]) -> None:
    """Adds all shares of a block and loads its queries, by `load_all`, or `load` of a step, after the first stages."""
    stages = block.launch.config.stages
    if not block.launch.warps_apart:

        def one(n, _):
            def release_and_load():
                plgpu.barrier_wait(block.scratch.empty.at[lax.rem(n, stages)])
                pl.when(n + stages < block.steps)(lambda: load(n + stages))

            _add(block, n, release_and_load)

        lax.fori_loop(0, jnp.minimum(block.steps, stages), lambda n, _: load(n), None)
        lax.fori_loop(0, block.steps, one, None)
        return

    def add_shares(slot):
        count = lax.div(block.steps - slot + SHARES - 1, SHARES)
        lax.fori_loop(0, count, lambda i, _: _add(block, slot + i * SHARES, lambda: None), None)

    @plgpu.warp_map
    def _(warp):
        pl.when(warp == 0)(load_all)
        pl.when((warp > 0) & (warp <= SHARES))(lambda: add_shares(warp - 1))


def _add(block: Block, n: Any, meanwhile: Callable[[], None]) -> None:
    """Adds the n-th step's share to its sum. Without finishers the last block of a query tile stores dquery instead."""
    scratch, launch, batch, turns = block.scratch, block.launch, block.lane.batch, block.turns
    slot = lax.rem(n, SHARES)
    head, query_tile = block.queries(n)
    turn = launch.turn(batch, head, query_tile)
    sums = [launch.part_of(block.outputs.sums, batch, head, query_tile, i) for i in range(WARPGROUPS)]
    is_last = jnp.asarray(block.is_last_of(query_tile, n >= block.first_steps))

    def await_others(count):
        plgpu.semaphore_wait(turns.at[turn], count, decrement=False, memory_scope="gpu")

    def load_sum():
        # While this step's products are under way.
        await_others(block.tile)
        for i in range(WARPGROUPS):
            plgpu.copy_gmem_to_smem(sums[i], scratch.share.at[slot, i], launch.sum_full(scratch, slot))

    if not launch.has_finishers:
        pl.when(is_last & (block.tile > 0))(load_sum)
    meanwhile()
    plgpu.barrier_wait(scratch.share_full.at[slot])

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
            _send(scratch.dquery.at(slot, i), place)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    lax.cond(is_last, store, add) if not launch.has_finishers else add()
    plgpu.semaphore_signal(turns.at[turn], memory_scope="gpu")
    plgpu.barrier_arrive(scratch.share_empty.at[slot])


def _send(part: RowTiles, place: Any) -> None:
    """Starts TMA copies of a part of dquery, from columns that the compiler knows: the producer has few registers."""
    for start, panel in part.panels():
        plgpu.copy_smem_to_gmem(panel, place.at[:, pl.ds(start, panel.shape[1])])


def multiply(block: Block, warpgroup: Any, both_ds: Any, keys: Any, dq: Any) -> None:
    """Starts a warpgroup's half of a share: score gradients, of both warpgroups, by the block's keys."""
    launch, (form, _), tile = block.launch, block.launch.problem.forms, block.scratch.k.at(rows=keys)
    own_ds = both_ds.at[:, pl.ds(warpgroup * PART, PART)] if launch.splits_rows else both_ds
    overlap = WARPGROUPS * (PART - launch.width)  # columns that both warpgroups compute
    if not form.in_panels:
        columns = tile.only_panel
        if not launch.splits_rows:
            columns = columns.at[:, pl.ds(warpgroup * (PART - overlap), PART)]
        plgpu.wgmma(dq, own_ds.transpose((1, 0)), columns)
        return
    width = form.size // form.copies
    first = 0 if launch.splits_rows else warpgroup * ((PART - overlap) // width)
    for i in range(PART // width):
        own_dq = dq if width == PART else dq.at[:, pl.ds(i * width, width)]
        plgpu.wgmma(own_dq, own_ds.transpose((1, 0)), tile.read.at[first + i, tile.rows])


def give(block: Block, warpgroup: Any, n: Any, values: jax.Array, query_tile: Any, *, is_masked: bool) -> None:
    """Gives the producer a warpgroup's half of a share; or dquery, where the block is the last to add to it."""
    scratch, launch = block.scratch, block.launch
    slot = lax.rem(n, SHARES)
    pl.when(n >= SHARES)(lambda: plgpu.barrier_wait(scratch.share_empty.at[slot]))

    def put():
        scratch.share.at[slot, warpgroup][...] = values

    def finish():
        pl.when(block.tile == 0)(lambda: store(values))
        pl.when(block.tile > 0)(lambda: store(with_others(values)))

    def with_others(values):
        plgpu.barrier_wait(launch.sum_full(scratch, slot))
        return values + scratch.share.at[slot, warpgroup][...]

    def store(total):
        # Other threads of the warpgroup read what this one overwrites.
        plgpu.commit_smem()
        scratch.dquery.at(slot, warpgroup).store(total * launch.problem.scale)

    is_last = block.is_last_of(query_tile, is_masked)
    pl.when(not is_last if isinstance(is_last, bool) else ~is_last)(put)
    pl.when(is_last)(finish)
    fence()
    plgpu.barrier_arrive(scratch.share_full.at[slot])


def await_added(block: Block) -> None:
    """Waits for a block's last shares: no barrier may be left with an arrival that nobody has seen."""
    for i in range(SHARES):
        last = block.scratch.share_empty.at[lax.rem(block.steps - 1 - i, SHARES)]
        pl.when(block.steps > i)(lambda last=last: plgpu.barrier_wait(last))


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
        pl.when(n >= SHARES)(lambda: plgpu.barrier_wait(scratch.share_full.at[slot]))
        batch, head, tile = at(n)
        turn = block.turns.at[launch.turn(batch, head, tile)]
        plgpu.semaphore_wait(turn, launch.key_tiles, decrement=False, memory_scope="gpu")
        for i in range(WARPGROUPS):
            part = launch.part_of(block.outputs.sums, batch, head, tile, i)
            plgpu.copy_gmem_to_smem(part, scratch.share.at[slot, i], scratch.sum_full.at[slot])

    lax.fori_loop(0, count, step, None)
    drain(scratch.share_full, SHARES, count)


def consume_finished(block: Block, number: Any, warpgroup: Any) -> None:
    """Scales, rounds and stores a warpgroup's half of a finisher's query tiles."""
    launch, scratch, dquery = block.launch, block.scratch, block.outputs.dquery
    count, at = _finished_tiles(block, number)

    def step(n, _):
        slot = lax.rem(n, SHARES)
        plgpu.barrier_wait(scratch.sum_full.at[slot])
        total = scratch.share.at[slot, warpgroup][...] * launch.problem.scale
        plgpu.commit_smem()  # all threads have read
        own = scratch.dquery.at(slot, warpgroup)
        own.store(total)
        plgpu.commit_smem()
        _send(own, launch.part_of(dquery, *at(n), warpgroup))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(scratch.share_full.at[slot])

    lax.fori_loop(0, count, step, None)
