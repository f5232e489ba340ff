"""The producer, which loads queries, keys and values into a block's shared memory ahead of the consumers."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.decode_attention.config import QUERIES, ROWS, TILE_KEYS
from pallas_kernels.ops.decode_attention.plan import Item, Plan
from pallas_kernels.primitives.row_tiles import shared


class Ring(NamedTuple):
    """Shared memory and barriers of a block; each consumer has a ring of key and value stages.

    newest: keys and values of the newest tokens, on their way into the caches; None without them.
    """

    newest: Any
    newest_here: Any
    keys: Any
    keys_empty: Any
    keys_full: Any
    query: Any
    query_empty: Any
    query_full: Any
    values: Any
    values_empty: Any
    values_full: Any


def ring_types(plan: Plan) -> Ring:
    """The scratch types of a block's ring."""
    tiles = (plan.warpgroups, plan.stages, TILE_KEYS, plan.head_size)
    rings = plan.warpgroups * plan.stages
    full = plgpu.Barrier(num_arrivals=plan.pieces, num_barriers=rings)
    empty = plgpu.Barrier(num_barriers=rings)
    return Ring(
        newest=plgpu.SMEM((2, plan.tokens, plan.head_size), plan.dtype) if plan.appends else None,
        newest_here=plgpu.Barrier(num_arrivals=2) if plan.appends else None,
        keys=shared(tiles, plan.dtype),
        keys_empty=empty,
        keys_full=full,
        query=shared((QUERIES, ROWS, plan.head_size), plan.dtype),
        query_empty=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=QUERIES),
        query_full=plgpu.Barrier(num_barriers=QUERIES),
        values=shared(tiles, plan.dtype),
        values_empty=empty,
        values_full=full,
    )


def for_each_item(plan: Plan, work, carry: Any) -> Any:
    """Runs carry = work(item, its number in the block, carry) for each work item of the block; returns the last."""

    @plgpu.nd_loop((plan.items,), collective_axes="block", init_carry=carry)
    def last(info, carry: Any) -> Any:
        return work(plan.item(info.index[0]), info.local_index, carry)

    return last


def append(item: Item, length, tiles, caches, page_table_ref, ring: Ring) -> None:
    """Writes the part's new keys and values into the caches, and waits until loads by TMA can see them.

    tiles: the part's first tile, and the one behind its last.
    """
    plgpu.barrier_wait(ring.newest_here)

    @pl.loop(0, item.plan.tokens)
    def _(token):
        position, place = item.newest(length, token, page_table_ref)

        @pl.when((position >= tiles[0] * TILE_KEYS) & (position < tiles[1] * TILE_KEYS))
        def _():
            for which, cache in enumerate(caches):
                plgpu.copy_smem_to_gmem(ring.newest.at[which, token], cache.at[place])

    plgpu.wait_smem_to_gmem(0)


def produce(plan: Plan, query_ref, keys_ref, values_ref, new_refs, lengths_ref, page_table_ref, ring: Ring) -> None:
    """Runs the producer: loads queries, keys and values of every part as soon as a stage is free.

    new_refs: keys and values of the newest tokens, which are written before the first tile that holds one is loaded.
    """
    loaded = min(ROWS, -(-plan.rows // 8) * 8)

    def work(item: Item, number, before):
        length, first, count = item.tiles(lengths_ref)
        slot = lax.rem(number, QUERIES)
        pl.when(number >= QUERIES)(lambda: plgpu.barrier_wait(ring.query_empty.at[slot]))
        plgpu.copy_gmem_to_smem(
            query_ref.at[item.batch, item.head, pl.ds(item.row_block * ROWS, loaded)],
            ring.query.at[slot, pl.ds(0, loaded)],
            ring.query_full.at[slot],
        )

        # The first of the part's tiles with a new token; if it has none, one behind its last.
        grown = jnp.maximum(first, jnp.maximum(length - plan.tokens, 0) // TILE_KEYS)
        for which, ref in enumerate(new_refs):
            load = partial(plgpu.copy_gmem_to_smem, ref.at[item.batch, :, item.head], ring.newest.at[which])
            pl.when(grown < first + count)(partial(load, ring.newest_here))

        def load_tiles(i, _):
            for warpgroup in range(plan.warpgroups):
                tile = i * plan.warpgroups + warpgroup

                @pl.when(tile < count)
                def _(warpgroup=warpgroup, tile=tile):
                    if plan.appends:
                        part = (first, first + count)
                        write = partial(append, item, length, part, (keys_ref, values_ref), page_table_ref, ring)
                        pl.when(first + tile == grown)(write)
                    load = before[warpgroup] + i
                    stage = lax.rem(load, plan.stages)
                    barrier = warpgroup * plan.stages + stage
                    sources = item.sources(first + tile, page_table_ref)
                    for ref, buffer, full, empty in (
                        (keys_ref, ring.keys, ring.keys_full, ring.keys_empty),
                        (values_ref, ring.values, ring.values_full, ring.values_empty),
                    ):
                        pl.when(load >= plan.stages)(lambda empty=empty: plgpu.barrier_wait(empty.at[barrier]))
                        size = TILE_KEYS // plan.pieces
                        for piece, source in enumerate(sources):
                            rows = pl.ds(piece * size, size)
                            place = (warpgroup, stage, rows) if plan.pieces > 1 else (warpgroup, stage)
                            plgpu.copy_gmem_to_smem(ref.at[source], buffer.at[place], full.at[barrier])

        lax.fori_loop(0, item.own(count, 0), load_tiles, None)
        return *(before[w] + item.own(count, w) for w in range(plan.warpgroups)), number + 1

    *loads, items = for_each_item(plan, work, (jnp.int32(0),) * (plan.warpgroups + 1))

    # No barrier may be left with an arrival that nobody has seen.
    def drain(barriers, first, places, total):
        def wait(i, _):
            plgpu.barrier_wait(barriers.at[first + lax.rem(i, places)])

        lax.fori_loop(jnp.maximum(total - places, 0), total, wait, None)

    for warpgroup, total in enumerate(loads):
        for barriers in (ring.keys_empty, ring.values_empty):
            drain(barriers, warpgroup * plan.stages, plan.stages, total)
    drain(ring.query_empty, 0, QUERIES, items)
