"""The producer warpgroup, which loads queries, keys and values into a block's shared memory ahead of the consumers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.decode_attention.config import QUERIES, ROWS, TILE_KEYS
from pallas_kernels.ops.decode_attention.plan import Item, Plan
from pallas_kernels.primitives.gemm.shared import shared


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Shared memory and its barriers: of keys and values a ring for each computing warpgroup."""

    query: Any
    keys: Any
    values: Any
    query_full: Any
    query_empty: Any
    keys_full: Any
    keys_empty: Any
    values_full: Any
    values_empty: Any


def ring_types(plan: Plan) -> dict[str, Any]:
    """A block's scratch, by the names that `Ring` has."""
    config = plan.config
    tiles = (config.warpgroups, config.stages, TILE_KEYS, plan.head_size)
    rings = config.warpgroups * config.stages
    return {
        "query": shared((QUERIES, ROWS, plan.head_size), plan.dtype),
        "keys": shared(tiles, plan.dtype),
        "values": shared(tiles, plan.dtype),
        "query_full": plgpu.Barrier(num_barriers=QUERIES),
        "query_empty": plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=QUERIES),
        **{n: plgpu.Barrier(num_arrivals=plan.pieces, num_barriers=rings) for n in ("keys_full", "values_full")},
        **{name: plgpu.Barrier(num_barriers=rings) for name in ("keys_empty", "values_empty")},
    }


def for_each_item(plan: Plan, work, carry: Any) -> Any:
    """Calls work(item, its number among the block's, carry), which gives the next carry; returns the last."""

    @plgpu.nd_loop((plan.items,), collective_axes="block", init_carry=carry)
    def last(info, carry: Any) -> Any:
        return work(plan.item(info.index[0]), info.local_index, carry)

    return last


def produce(plan: Plan, query_ref, keys_ref, values_ref, lengths_ref, page_table_ref, ring: Ring) -> None:
    """Loads queries, keys and values of every part, as early as there is room."""
    config = plan.config
    loaded = min(ROWS, -(-plan.rows // 8) * 8)

    def work(item: Item, number, before):
        first, count = item.tiles(lengths_ref)[1:]
        slot = lax.rem(number, QUERIES)

        @pl.when(number >= QUERIES)
        def _():
            plgpu.barrier_wait(ring.query_empty.at[slot])

        plgpu.copy_gmem_to_smem(
            query_ref.at[item.batch, item.head, pl.ds(item.row_block * ROWS, loaded)],
            ring.query.at[slot, pl.ds(0, loaded)],
            ring.query_full.at[slot],
        )

        def load_tiles(i, _):
            for warpgroup in range(config.warpgroups):
                tile = i * config.warpgroups + warpgroup

                @pl.when(tile < count)
                def _(warpgroup=warpgroup, tile=tile):
                    load = before[warpgroup] + i
                    stage = lax.rem(load, config.stages)
                    barrier = warpgroup * config.stages + stage
                    sources = item.sources(first + tile, page_table_ref)
                    for ref, buffer, full, empty in (
                        (keys_ref, ring.keys, ring.keys_full, ring.keys_empty),
                        (values_ref, ring.values, ring.values_full, ring.values_empty),
                    ):

                        @pl.when(load >= config.stages)
                        def _(empty=empty):
                            plgpu.barrier_wait(empty.at[barrier])

                        size = TILE_KEYS // plan.pieces
                        for piece, source in enumerate(sources):
                            rows = pl.ds(piece * size, size)
                            target = (
                                buffer.at[warpgroup, stage, rows] if plan.pieces > 1 else buffer.at[warpgroup, stage]
                            )
                            plgpu.copy_gmem_to_smem(ref.at[source], target, full.at[barrier])

        lax.fori_loop(0, item.own(count, 0), load_tiles, None)
        return *(before[w] + item.own(count, w) for w in range(config.warpgroups)), number + 1

    *loads, items = for_each_item(plan, work, (jnp.int32(0),) * (config.warpgroups + 1))

    # No barrier may be left with an arrival that nobody has seen.
    def drain(barriers, first, places, total):
        def wait(i, _):
            plgpu.barrier_wait(barriers.at[first + lax.rem(i, places)])

        lax.fori_loop(jnp.maximum(total - places, 0), total, wait, None)

    for warpgroup, total in enumerate(loads):
        for barriers in (ring.keys_empty, ring.values_empty):
            drain(barriers, warpgroup * config.stages, config.stages, total)
    drain(ring.query_empty, 0, QUERIES, items)
