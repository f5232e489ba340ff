"""dquery, dkey and dvalue in one kernel, which computes scores once: five products a tile instead of seven.

A block works as in `backward_keys`, and multiplies its score gradients by its keys besides. That product is the block's
share of dquery, which the warpgroup that brings queries adds to a float32 array in device memory, by TMA. The blocks
that share queries do so in the order of their keys, each one waiting for the one before it: sums come out the same
whatever the order in which blocks run. The first one stores its share, so that nothing need be set to zero before; the
last one stores no sum, but dquery. A block goes over queries from the last one down, as do those that it waits for,
which were all launched before it: so the first of the running blocks never waits, and none waits for ever.

Sources: the backward pass of Shah et al., "FlashAttention-3", 2024, https://arxiv.org/abs/2407.08608; queries from the
last one down: Qiang et al., "DASH: Deterministic Attention Scheduling", 2026, https://arxiv.org/abs/2601.21824
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ops.attention.backward_batch import by_batch
from pallas_kernels.ops.attention.backward_config import WARPGROUP_ROWS, FusedConfig
from pallas_kernels.ops.attention.backward_tiles import (
    Tile,
    Visits,
    block_place,
    kept_scale,
    not_invariant,
    store_columns,
)
from pallas_kernels.ops.attention.problem import Problem
from pallas_kernels.primitives.gemm.shared import shared
from pallas_kernels.primitives.platform import target_device
from pallas_kernels.primitives.random import mixed_words

HEAD_SIZE = 128
_WARPGROUPS = 2
COLUMNS = _WARPGROUPS * WARPGROUP_ROWS
"""Keys of a block."""
_SHARE = HEAD_SIZE // _WARPGROUPS
"""Columns of dquery that one warpgroup makes."""


def fused_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    rows: jax.Array,
    extras: Mapping[str, jax.Array],
    *,
    problem: Problem,
    config: FusedConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (dquery, dkey, dvalue), like query, key and value; dquery may have more queries, which say nothing.

    Copies under `jax.vmap` run as one launch, with which they share no turns.

    Args:
        query, key, value, dout: lengths in multiples of 8, head size 128.
        rows: of `rows_of`.
        extras: those that there are of "words" and "dense" (its last axes keys, queries). No segments.
    """
    return by_batch(partial(_launch, config=config), problem, (query, key, value, dout, rows), extras)


def _launch(
    problem: Problem, operands: tuple[jax.Array, ...], extras: Mapping[str, jax.Array], *, config: FusedConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, key, value, dout, rows = operands
    batch, _, heads, size = query.shape
    masking = problem.masking
    blocks = pl.cdiv(masking.keys, COLUMNS)
    query_tiles = pl.cdiv(masking.queries, config.rows)
    lanes = batch * problem.key_heads
    at_once = target_device().core_count
    dtype = problem.dtype

    def attention_backward_fused(
        query_ref, key_ref, value_ref, dout_ref, rows_ref, extras_refs, dquery_ref, dkey_ref, dvalue_ref, *refs
    ):
        sums_ref, scratch = refs
        (k, v, q, do, qrows, ds, share), (held, full, empty, met, made, taken, fetched) = scratch
        warpgroup = lax.axis_index("warpgroup")
        tile_index, lane = block_place(
            lax.axis_index("block"),
            tiles=blocks,
            lanes=lanes,
            # Queries and their cotangents, and the sums in float32.
            lane_bytes=8 * problem.group * query.shape[1] * size,
            section_blocks=config.waves * at_once,
        )
        b, key_head = lax.div(lane, problem.key_heads), lax.rem(lane, problem.key_heads)
        first_key = tile_index * COLUMNS
        visits = Visits(tiles=masking.query_tiles(first_key, COLUMNS, config.rows))
        first_head = key_head * problem.group
        full_steps = problem.group * visits.full
        steps = full_steps + problem.group * visits.masked
        turns = pl.get_global(plgpu.SemaphoreType.REGULAR((batch * heads * query_tiles,)))

        def is_last_of(query_tile, is_masked):
            """Whether no block adds to a tile of queries after this one, which then makes dquery of it."""
            if masking.right is None:
                return tile_index == blocks - 1
            if masking.right == 0 and masking.queries <= masking.keys and masking.keys % COLUMNS == 0:
                # Known where the program is made: registers are short.
                return is_masked
            return tile_index == masking.key_tiles(query_tile * config.rows, config.rows, COLUMNS).last - 1

        def place_of(n, is_masked=None):
            """(head, query tile) of a step: full tiles first, and the last one first."""
            if is_masked is None:
                is_masked = n >= full_steps
                places = place_of(n, True), place_of(n, False)
                return tuple(jnp.where(is_masked, masked, full) for masked, full in zip(*places, strict=True))
            i = n - full_steps if is_masked else n
            count = jnp.maximum(visits.masked if is_masked else visits.full, 1)
            if config.heads_inside and problem.group > 1:
                # No count is divided by; at least 1 all the same, without which ptxas spills six registers.
                g, i = lax.rem(i, problem.group), count - 1 - lax.div(i, problem.group)
            else:
                g, i = lax.div(i, count), count - 1 - lax.rem(i, count)
            return first_head + g, visits.masked_tile(i) if is_masked else visits.full_tile(i)

        @pl.when(warpgroup == _WARPGROUPS)
        def _():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            own = (b, pl.ds(first_key, COLUMNS), key_head)
            plgpu.copy_gmem_to_smem(key_ref.at[own], k, held)
            plgpu.copy_gmem_to_smem(value_ref.at[own], v, held)

            def bring(n):
                stage = lax.rem(n, config.stages)
                head, query_tile = place_of(n)
                place = pl.ds(query_tile * config.rows, config.rows)
                plgpu.copy_gmem_to_smem(query_ref.at[b, place, head], q.at[stage], full.at[stage])
                plgpu.copy_gmem_to_smem(dout_ref.at[b, place, head], do.at[stage], full.at[stage])
                plgpu.copy_gmem_to_smem(rows_ref.at[b, head, :, place], qrows.at[stage], full.at[stage])

            lax.fori_loop(0, jnp.minimum(steps, config.stages), lambda n, _: bring(n), None)

            def step(n, _):
                stage, slot = lax.rem(n, config.stages), lax.rem(n, config.shares)
                head, query_tile = place_of(n)
                turn = (b * heads + head) * query_tiles + query_tile
                sums = [
                    sums_ref.at[b, pl.ds(query_tile * config.rows, config.rows), head, pl.ds(i * _SHARE, _SHARE)]
                    for i in range(_WARPGROUPS)
                ]
                is_last = is_last_of(query_tile, n >= full_steps)

                def await_turn():
                    # The tiles of keys that a tile of queries sees begin with the first.
                    plgpu.semaphore_wait(turns.at[turn], tile_index, decrement=False, memory_scope="gpu")

                @pl.when(is_last & (tile_index > 0))
                def _():
                    # While this step's products are under way.
                    await_turn()
                    for i in range(_WARPGROUPS):
                        plgpu.copy_gmem_to_smem(sums[i], share.at[slot, i], fetched)

                plgpu.barrier_wait(empty.at[stage])
                pl.when(n + config.stages < steps)(lambda: bring(n + config.stages))
                plgpu.barrier_wait(made.at[slot])

                def put(reduction=None):
                    for i in range(_WARPGROUPS):
                        plgpu.copy_smem_to_gmem(share.at[slot, i], sums[i], reduction_op=reduction)

                @pl.when(~is_last)
                def _():
                    await_turn()
                    pl.when(tile_index == 0)(put)
                    pl.when(tile_index > 0)(lambda: put("add"))
                    # All is there, not only read.
                    plgpu.wait_smem_to_gmem(0)

                plgpu.semaphore_signal(turns.at[turn], memory_scope="gpu")
                plgpu.barrier_arrive(taken.at[slot])

            lax.fori_loop(0, steps, step, None)

        @pl.when(warpgroup < _WARPGROUPS)
        def _():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            plgpu.barrier_wait(held)
            first = warpgroup * WARPGROUP_ROWS
            shape = (WARPGROUP_ROWS, config.rows)
            words = mixed_words(extras_refs["words"]) if "words" in extras_refs else None

            def run(dk, dv):
                def step(n, is_masked):
                    stage = lax.rem(n, config.stages)
                    head, query_tile = place_of(n, is_masked)
                    tile = Tile(
                        problem=problem,
                        query_axis=1,
                        shape=shape,
                        batch=b,
                        head=head,
                        row=query_tile * config.rows,
                        column=first_key + first,
                        extras=extras_refs,
                        words=words,
                        places=qrows.at[stage, 2],
                    )
                    plgpu.barrier_wait(full.at[stage])
                    again = not_invariant(n) * WARPGROUP_ROWS
                    own = pl.ds(first + again, WARPGROUP_ROWS)
                    both_ds = ds.at[lax.rem(n, 2)]

                    def products(s, dp):
                        plgpu.wgmma(s, k.at[own], q.at[stage].transpose((1, 0)))
                        plgpu.wgmma(dp, v.at[own], do.at[stage].transpose((1, 0)))
                        scores = plgpu.wgmma_accumulator_load(s, wait_n=1)
                        lse = plgpu.load(qrows.at[stage, 0], layout=tile.row_layout())
                        weights, slope = tile.weights(scores, lse, is_masked=is_masked)
                        weights = tile.marked(weights)
                        plgpu.wgmma(dv, tile.dropped(weights).astype(dtype), do.at[stage])
                        dweights = plgpu.wgmma_accumulator_load(dp, wait_n=1)
                        delta = plgpu.load(qrows.at[stage, 1], layout=tile.row_layout())
                        dscores = tile.score_gradients(weights, dweights, delta)
                        narrow = (dscores if slope is None else dscores * slope).astype(dtype)
                        plgpu.wgmma(dk, narrow, q.at[stage])
                        both_ds.at[pl.ds(first, WARPGROUP_ROWS)][...] = narrow
                        plgpu.commit_smem()

                    pl.run_scoped(products, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * 2)
                    plgpu.barrier_arrive(met)
                    plgpu.barrier_wait(met)

                    def add(dq):
                        keys = k.at[pl.ds(again, COLUMNS), pl.ds(warpgroup * _SHARE, _SHARE)]
                        plgpu.wgmma(dq, both_ds.transpose((1, 0)), keys)
                        values = dq[...]
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(empty.at[stage])
                        slot = lax.rem(n, config.shares)
                        pl.when(n >= config.shares)(lambda: plgpu.barrier_wait(taken.at[slot]))

                        def give():
                            share.at[slot, warpgroup][...] = values

                        def finish():
                            pl.when(tile_index == 0)(lambda: store(values))
                            pl.when(tile_index > 0)(lambda: store(with_others(values)))

                        def with_others(values):
                            plgpu.barrier_wait(fetched)
                            return values + share.at[slot, warpgroup][...]

                        def store(total):
                            own = pl.ds(query_tile * config.rows, config.rows)
                            columns = pl.ds(warpgroup * _SHARE, _SHARE)
                            dquery_ref[b, own, head, columns] = (total * problem.scale).astype(dtype)

                        is_last = is_last_of(query_tile, is_masked)
                        pl.when(not is_last if isinstance(is_last, bool) else ~is_last)(give)
                        pl.when(is_last)(finish)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(made.at[slot])

                    pl.run_scoped(add, plgpu.WGMMAAccumulatorRef((config.rows, _SHARE), jnp.float32))

                lax.fori_loop(0, full_steps, lambda n, _: step(n, False), None)
                if not isinstance(visits.masked, int) or visits.masked:
                    lax.fori_loop(full_steps, steps, lambda n, _: step(n, True), None)
                for i in range(config.shares):
                    pl.when(steps > i)(lambda i=i: plgpu.barrier_wait(taken.at[lax.rem(steps - 1 - i, config.shares)]))
                return dk[...], dv[...]

            dk, dv = pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, size), jnp.float32)] * 2)
            own = pl.ds(first, WARPGROUP_ROWS)
            # All products with k were done when the last share was taken.
            store_columns(k.at[own], dk * problem.scale)
            store_columns(v.at[own], dv * kept_scale(problem))
            plgpu.commit_smem()
            place = (b, pl.ds(first_key + first, WARPGROUP_ROWS), key_head)
            plgpu.copy_smem_to_gmem(k.at[own], dkey_ref.at[place])
            plgpu.copy_smem_to_gmem(v.at[own], dvalue_ref.at[place])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # Whole tiles of dquery: threads store them, who do not stop at the last query as TMA does.
    whole = jax.ShapeDtypeStruct((batch, query_tiles * config.rows, heads, size), dtype)
    kernel = plgpu.kernel(
        attention_backward_fused,
        out_type=[
            whole,
            *(jax.ShapeDtypeStruct(array.shape, dtype) for array in (key, value)),
            jax.ShapeDtypeStruct(query.shape, jnp.float32),
        ],
        grid=(blocks * lanes,),
        grid_names=("block",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=(
            (
                (
                    shared((COLUMNS, size), dtype),
                    shared((COLUMNS, size), dtype),
                    shared((config.stages, config.rows, size), dtype),
                    shared((config.stages, config.rows, size), dtype),
                    plgpu.SMEM((config.stages, 3, config.rows), jnp.float32),
                    shared((2, COLUMNS, config.rows), dtype),
                    shared((config.shares, _WARPGROUPS, config.rows, _SHARE), jnp.float32),
                ),
                (
                    plgpu.Barrier(num_arrivals=2),
                    plgpu.Barrier(num_arrivals=3, num_barriers=config.stages),
                    plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=config.stages),
                    plgpu.Barrier(num_arrivals=_WARPGROUPS),
                    plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=config.shares),
                    plgpu.Barrier(num_barriers=config.shares),
                    plgpu.Barrier(num_arrivals=_WARPGROUPS),
                ),
            ),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not config.automatic_barriers),
    )
    dquery, dkey, dvalue, _ = kernel(query, key, value, dout, rows, dict(extras))
    return dquery, dkey, dvalue
