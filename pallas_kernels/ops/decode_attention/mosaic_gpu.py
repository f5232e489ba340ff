"""Decoding attention on Mosaic GPU: one block a multiprocessor, and every key and value is read once.

The query heads that share keys, times the newest tokens, are the rows of one product. A sequence's keys are split into
parts; a block takes one part after the other. Its producer loads key and value tiles by TMA, ahead of the consumers and
across parts. The consumers take tiles in turn, each with its own ring and online softmax, and add up their results at
the end of a part (unnormalised sums, maxima and sums of weights). If sequences have several parts, these results go to
device memory, and a small second kernel combines the parts in a fixed order.

Tiles that no query sees are not read: the time depends on the lengths, not on the size of the cache.

Keys and values of the newest tokens may still lie outside the caches: the producer writes them, in place, before it
loads the first tile that holds one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.launch import REGISTERS, block_kernel, run_roles
from pallas_kernels.ops.decode_attention.combine import Finish, combine, finish_types
from pallas_kernels.ops.decode_attention.plan import (
    QUERIES,
    ROWS,
    TILE_KEYS,
    Item,
    Plan,
    ScoreRule,
    choose_splits,
    fitting_stages,
)
from pallas_kernels.primitives.barriers import drain
from pallas_kernels.primitives.exponents import LOWEST_SCORE
from pallas_kernels.primitives.flop_metadata import product
from pallas_kernels.primitives.platform import target_device, varying_like
from pallas_kernels.primitives.references import changed_in_place
from pallas_kernels.primitives.row_tiles import shared
from pallas_kernels.primitives.rows import THREADS

_UNSEEN = -3e38
"""Scores of hidden keys: their weights are zero beside any maximum."""


def decode_forward(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    lengths: jax.Array,
    *,
    scores: ScoreRule,
    page_table: jax.Array | None = None,
    new: tuple[jax.Array, jax.Array] | None = None,
    splits: int | None = None,
    warpgroups: int | None = None,
    stages: int = 8,
) -> tuple[jax.Array, ...]:
    """Returns (out,), out like query; with `new`, (out, key_cache, value_cache) with the new tokens written.

    query: (B, T, N, D), key_cache, value_cache: (B, S, K, D) of one 16-bit dtype, S a multiple of eight, D of 32.
    lengths: (B,) int32. page_table: (B, pages of a sequence) int32, for caches (pages, page size, K, D), the page size
    8, 16, 32 or a multiple of 64. new: keys and values of the newest tokens, (B, T, K, D) each, or None if the caches
    hold them. splits, warpgroups, stages: see `Plan`; None: as many as are fastest; as many stages as fit, at most.
    """
    batch, tokens, heads, head_size = query.shape
    keys, kv_heads = key_cache.shape[1] * (1 if page_table is None else page_table.shape[1]), key_cache.shape[2]
    cores = target_device().core_count
    # With larger heads, two rings would have room for a tile or two each.
    warpgroups = warpgroups or (2 if head_size <= 128 else 1)
    room = {"head_size": head_size, "itemsize": query.dtype.itemsize, "new_tokens": tokens if new else 0}
    plan = Plan(
        batch=batch,
        kv_heads=kv_heads,
        tokens=tokens,
        group=heads // kv_heads,
        keys=keys,
        head_size=head_size,
        dtype=query.dtype,
        scores=scores,
        splits=splits or choose_splits(batch * kv_heads, keys, cores),
        warpgroups=warpgroups,
        stages=fitting_stages(stages, warpgroups=warpgroups, **room),
        pages=None if page_table is None else key_cache.shape[0],
        page_size=key_cache.shape[1],
        appends=new is not None,
    )
    rows = tokens * plan.group
    grouped = query.reshape(batch, tokens, kv_heads, plan.group, head_size).swapaxes(1, 2)
    grouped = grouped.reshape(batch, kv_heads, rows, head_size)
    if plan.rows != rows:
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, plan.rows - rows), (0, 0)))
    indices = [lengths] if page_table is None else [lengths, page_table]
    launch, caches = _kernel(plan, cores), (key_cache, value_cache)
    if new is None:
        outputs = launch(grouped, *caches, (), indices)
    else:
        extended = lambda query, new, indices, caches: launch(query, *caches, new, indices)  # noqa: E731
        outputs, caches = changed_in_place(extended, (grouped, new, indices), caches)
    out = outputs[0] if plan.is_direct else combine(plan, *outputs)
    out = varying_like(out, query, key_cache, value_cache, *indices)
    return (out,) if new is None else (out, *caches)


def _kernel(plan: Plan, cores: int) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the launch, which returns the output if parts are whole sequences; else the operands of `combine`."""
    rows = plan.batch * plan.kv_heads * plan.group * plan.tokens

    def decode_attention(query_ref, keys_ref, values_ref, new_refs, index_refs, *refs):
        lengths_ref, page_table_ref = index_refs if plan.pages is not None else (*index_refs, None)
        *output_refs, ring, finish_refs = refs
        finish = Finish(plan=plan, outputs=output_refs, **finish_refs)
        warpgroup = lax.axis_index("warpgroup")
        run_roles(
            warpgroup,
            plan.warpgroups,
            lambda: produce(plan, query_ref, (keys_ref, values_ref), new_refs, lengths_ref, page_table_ref, ring),
            lambda: _compute(plan, lengths_ref, ring, finish, warpgroup),
            REGISTERS if plan.warpgroups > 1 else None,
        )

    out_type = [jax.ShapeDtypeStruct((plan.batch, plan.tokens, plan.kv_heads * plan.group, plan.head_size), plan.dtype)]
    if not plan.is_direct:
        like = (plan.splits, plan.batch, plan.kv_heads, plan.rows, -(-plan.head_size // THREADS) * THREADS)
        statistics = (plan.splits, 2, plan.batch, plan.kv_heads, plan.row_blocks * ROWS)
        out_type = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (like, statistics)]
    return block_kernel(
        decode_attention,
        out_type=out_type,
        blocks=min(cores, plan.items),
        consumers=plan.warpgroups,
        scratch=(ring_types(plan), finish_types(plan)),
        automatic_barriers=False,
        products=product(rows, plan.keys, plan.head_size, plan.dtype).times(2),
    )


class Buffers(NamedTuple):
    """Tiles in shared memory. full, empty: barriers of a tile's place, which has arrived, or is free."""

    tiles: Any
    empty: Any
    full: Any


class Ring(NamedTuple):
    """Shared memory and barriers of a block; each consumer has a ring of key and value stages.

    newest: keys and values of the newest tokens, on their way into the caches; None without them.
    """

    newest: Any
    newest_here: Any
    keys: Buffers
    queries: Buffers
    values: Buffers


def ring_types(plan: Plan) -> Ring:
    """The scratch types of a block's ring."""
    rings = plan.warpgroups * plan.stages
    tiles = Buffers(
        tiles=shared((plan.warpgroups, plan.stages, TILE_KEYS, plan.head_size), plan.dtype),
        empty=plgpu.Barrier(num_barriers=rings),
        full=plgpu.Barrier(num_arrivals=plan.pieces, num_barriers=rings),
    )
    queries = Buffers(
        tiles=shared((QUERIES, ROWS, plan.head_size), plan.dtype),
        empty=plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=QUERIES),
        full=plgpu.Barrier(num_barriers=QUERIES),
    )
    return Ring(
        newest=plgpu.SMEM((2, plan.tokens, plan.head_size), plan.dtype) if plan.appends else None,
        newest_here=plgpu.Barrier(num_arrivals=2) if plan.appends else None,
        keys=tiles,
        queries=queries,
        values=tiles,
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


def produce(plan: Plan, query_ref, caches, new_refs, lengths_ref, page_table_ref, ring: Ring) -> None:
    """Runs the producer: loads queries, keys and values of every part as soon as a stage is free.

    caches: of keys and of values. new_refs: those of the newest tokens, which are written before the first tile that
    holds one is loaded.
    """
    loaded = min(ROWS, -(-plan.rows // 8) * 8)

    def work(item: Item, number, before):
        length, first, count = item.tiles(lengths_ref)
        slot = lax.rem(number, QUERIES)
        pl.when(number >= QUERIES)(lambda: plgpu.barrier_wait(ring.queries.empty.at[slot]))
        plgpu.copy_gmem_to_smem(
            query_ref.at[item.batch, item.head, pl.ds(item.row_block * ROWS, loaded)],
            ring.queries.tiles.at[slot, pl.ds(0, loaded)],
            ring.queries.full.at[slot],
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
                        write = partial(append, item, length, (first, first + count), caches, page_table_ref, ring)
                        pl.when(first + tile == grown)(write)
                    load = before[warpgroup] + i
                    stage = lax.rem(load, plan.stages)
                    barrier = warpgroup * plan.stages + stage
                    sources = item.sources(first + tile, page_table_ref)
                    for ref, own in zip(caches, (ring.keys, ring.values), strict=True):
                        pl.when(load >= plan.stages)(lambda own=own: plgpu.barrier_wait(own.empty.at[barrier]))
                        size = TILE_KEYS // plan.pieces
                        for piece, source in enumerate(sources):
                            rows = pl.ds(piece * size, size)
                            place = (warpgroup, stage, rows) if plan.pieces > 1 else (warpgroup, stage)
                            plgpu.copy_gmem_to_smem(ref.at[source], own.tiles.at[place], own.full.at[barrier])

        lax.fori_loop(0, item.own(count, 0), load_tiles, None)
        return *(before[w] + item.own(count, w) for w in range(plan.warpgroups)), number + 1

    *loads, items = for_each_item(plan, work, (jnp.int32(0),) * (plan.warpgroups + 1))

    for warpgroup, total in enumerate(loads):
        for own in (ring.keys, ring.values):
            drain(own.empty, plan.stages, total, warpgroup * plan.stages)
    drain(ring.queries.empty, QUERIES, items)


def _compute(plan: Plan, lengths_ref, ring: Ring, finish: Finish, warpgroup) -> None:
    """Runs a consumer: attention over its tiles of every part."""
    layout = plgpu.Layout.WGMMA
    tile_shape = (ROWS, TILE_KEYS)

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def over(value, shape):
        return lax.broadcast_in_dim(value, shape, (0,))

    def positions(item: Item, length):
        """The place in the sequence of each row's token, broadcast over the keys of a tile."""
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout.reduce(1)) + item.row_block * ROWS
        return over(length - plan.tokens + lax.div(row, jnp.int32(plan.group)), tile_shape)

    def work(item: Item, number, before):
        length, first, count = item.tiles(lengths_ref)
        own = item.own(count, warpgroup)
        query_slot = lax.rem(number, QUERIES)
        plgpu.barrier_wait(ring.queries.full.at[query_slot])

        def tile(i, carry, *, is_masked: bool):
            sums, maximum, total = carry
            stage = lax.rem(before + i, plan.stages)
            place = warpgroup * plan.stages + stage
            plgpu.barrier_wait(ring.keys.full.at[place])

            def multiply(accumulator):
                keys = ring.keys.tiles.at[warpgroup, stage]
                plgpu.wgmma(accumulator, ring.queries.tiles.at[query_slot], keys.transpose((1, 0)))
                return accumulator[...]

            scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(tile_shape, jnp.float32))
            plgpu.barrier_arrive(ring.keys.empty.at[place])
            scores = plan.scores.prepare(scores)
            if is_masked:
                start = (first + i * plan.warpgroups + warpgroup) * TILE_KEYS
                key = plgpu.broadcasted_iota(jnp.int32, tile_shape, 1, layout=layout) + start
                position = positions(item, length)
                is_seen = key <= position
                if plan.scores.window is not None:
                    is_seen &= key >= position - plan.scores.window
                scores = jnp.where(is_seen, scores, _UNSEEN)
            highest = jnp.maximum(maximum, jnp.max(scores, axis=1))
            shrink = jnp.exp2((maximum - highest) * plan.scores.factor)
            weights = jnp.exp2((scores - over(highest, tile_shape)) * plan.scores.factor)
            total = total * shrink + jnp.sum(weights, axis=1)
            rounded = weights.astype(plan.dtype)
            plgpu.barrier_wait(ring.values.full.at[place])

            def accumulate(accumulator):
                accumulator[...] = sums * over(shrink, sums.shape)
                plgpu.wgmma(accumulator, rounded, ring.values.tiles.at[warpgroup, stage])
                return accumulator[...]

            sums = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(sums.shape, jnp.float32))
            plgpu.barrier_arrive(ring.values.empty.at[place])
            return sums, highest, total

        carry = (
            full((ROWS, plan.head_size), 0, layout),
            full((ROWS,), LOWEST_SCORE, layout.reduce(1)),
            full((ROWS,), 0, layout.reduce(1)),
        )
        unmasked = jnp.int32(0)
        if plan.scores.window is None:
            # All tokens see the last key of the first tiles.
            seen = (length - plan.tokens + 1) // TILE_KEYS - first
            unmasked = jnp.clip((seen + plan.warpgroups - 1 - warpgroup) // plan.warpgroups, 0, own)
            carry = lax.fori_loop(0, unmasked, lambda i, c: tile(i, c, is_masked=False), carry)
        sums, maximum, total = lax.fori_loop(unmasked, own, lambda i, c: tile(i, c, is_masked=True), carry)
        plgpu.barrier_arrive(ring.queries.empty.at[query_slot])
        pl.when(warpgroup == 0)(lambda: finish.take_and_store(item, sums, maximum, total))
        if plan.warpgroups > 1:
            pl.when(warpgroup > 0)(lambda: finish.give(warpgroup - 1, sums, maximum, total))
        return before + own

    for_each_item(plan, work, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
